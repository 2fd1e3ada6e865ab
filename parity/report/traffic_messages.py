"""Messages between ranks: collectives of one step of each class, in the order of their calls.

Bytes are those of the tensor that one rank hands in. On the fast side nothing depends on values: a
rank that overflows, or has no gradients, sends what the others send. On the reference no rank sends
sums in a step that all ranks skip. The first message over each group carries refusals as well, and
the loss scale of the FP16 classes. Tests count the messages.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rich.table import Table

from twinstep.parity.report.table import plain_table


@dataclass(frozen=True)
class Message:
    """One collective.

    Attributes:
        collective: its name in `torch.distributed`.
        over: the group: "model", "data", "experts" (hold different ones), "copies" (of experts).
        size: bytes; None for pickled integers.
        each: "partition" or "group" where bytes are those of each of its elements: one message for
            each group, and bucket.
    """

    collective: str
    over: str
    size: int | None
    each: str = ""

    @property
    def amount(self) -> str:
        """The collective and its bytes, in words."""
        size = "pickled" if self.size is None else f"{self.size} B"
        return f"{self.collective} {size}" + (f" x {self.each}" if self.each else "")


@dataclass(frozen=True, kw_only=True)
class Step:
    """Messages of one step.

    Attributes:
        classes: by name.
        given: constructor arguments that matter.
        fast: messages of that side.
        reference: messages of that side.
    """

    classes: tuple[str, ...]
    given: str
    fast: tuple[Message, ...] = ()
    reference: tuple[Message, ...] = ()


def _limbs(over: str) -> Message:
    return Message("all_reduce", over, 256)


def _word(over: str, size: int = 4) -> Message:
    return Message("all_reduce", over, size)


def _agreement(over: str, size: int = 32) -> Message:
    """The worst gradient, a refusal, the scale and its negative, in float64."""
    return Message("all_reduce", over, size)


def _number(over: str) -> Message:
    return Message("all_gather_object", over, None)


def _gather(collective: str) -> Message:
    """Weights of bf16, which all ranks of a group bring together."""
    return Message(collective, "data", 2, "partition")


FP16 = ("FP16Optimizer", "FP16UnfusedOptimizer")
EXPERTS = ("experts", "copies", "model")
STEPS = (
    Step(classes=("FusedAdam", "FusedLamb", "FusedLAMB"), given="anything"),
    Step(classes=(*FP16, "BF16Optimizer", "ZeroOptimizer"), given="no groups"),
    Step(
        classes=FP16,
        given="mpu",
        fast=(_limbs("model"),),
        reference=(_agreement("model"), _word("model"), _number("model")),
    ),
    Step(
        classes=FP16,
        given="mpu, norm_type=inf",
        fast=(_limbs("model"),),
        reference=(_agreement("model"), _word("model"), _word("model")),
    ),
    Step(
        classes=FP16,
        given="mpu, norm_type=3",
        fast=(_limbs("model"), _word("model", 8)),
        reference=(_agreement("model"), _word("model"), _word("model", 8)),
    ),
    Step(
        classes=FP16,
        given="mpu, an engine that does not reduce",
        fast=(_word("data", 40), _limbs("model")),
        reference=(
            *map(_agreement, ("data", "model")),
            *(_word("model"), _number("model")),
        ),
    ),
    Step(
        classes=FP16,
        given="mpu, experts of one name",
        fast=tuple(map(_limbs, EXPERTS)),
        reference=(
            *map(_agreement, EXPERTS),
            *map(_word, ("model", *EXPERTS)),
            *map(_number, ("model", *EXPERTS)),
        ),
    ),
    Step(
        classes=("BF16Optimizer",),
        given="dp_process_group, mpu",
        fast=(_limbs("model"), _gather("all_gather_single")),
        reference=(
            *(_agreement("model", 16), _word("model"), _number("model")),
            _gather("all_gather"),
        ),
    ),
    Step(
        classes=("ZeroOptimizer",),
        given="dp_process_group, gradients taken by step",
        fast=(
            Message("reduce_scatter_single", "data", 2, "group"),
            *(_limbs("data"), _gather("all_gather_single")),
        ),
        reference=(
            *(_agreement("data", 16), Message("all_reduce", "data", 2, "group")),
            *(_number("data"), _gather("all_gather")),
        ),
    ),
)


def messages_table() -> Table:
    """Table of the messages of each class per step, on both sides."""
    table = plain_table(
        "messages of one rank per step, by what it hands in",
        ("class", "given", "fast", "reference"),
        (),
    )
    for step in STEPS:
        cells = [_in_short(messages) for messages in (step.fast, step.reference)]
        table.add_row(", ".join(step.classes), step.given, *cells)
    return table


def _in_short(messages: tuple[Message, ...]) -> str:
    counts = Counter(message.amount for message in messages)
    return ", ".join(f"{count} {amount}" for amount, count in counts.items()) or "none"
