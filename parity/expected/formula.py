"""A kernel's own formula in float64 against the specification in float64.

The specification is the reference's formula without roundings, as the bounds carry it; the kernel's
is what the precision lift read from its compiled code. No storage rounds anything, so that a wrong
formula shows that bf16 would hide. Both are evaluated in float64, whose roundings move a result by
at most the derived fp32 bound times 2^-29. A kernel that claims every bit may differ by that, and
by four ULP of float64. A bounded one may differ by the whole bound: scalars keep the roundings that
the kernel or its host made of them, where and in whatever arrangement that was, and the bound holds
for those among all others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twinstep.parity.cases.case import Case
from twinstep.parity.cases.guarded_memory import GuardedMemory, Span
from twinstep.parity.expected.outputs import Truth, truths
from twinstep.parity.records.errors import CannotJudge

if TYPE_CHECKING:
    from twinstep.replay.shadow64.lift import Lift, Wide

NARROWER = 2.0**-29
FEW_ULP = 2.0**-51


def tolerance(truth: Truth, arithmetic: str) -> Tensor:
    """Largest difference between equal formulas, their scalars rounded as the claim allows."""
    scalars = NARROWER if arithmetic == "exact" else 1.0
    return truth.error * scalars + truth.exact.abs() * FEW_ULP


@dataclass(frozen=True)
class Formulated:
    """One written tensor: what it should be in real numbers, and what the kernel's formula gives.

    Attributes:
        span: the tensor.
        truth: the specification.
        wide: the kernel's formula.
        foreign: whether the kernel also used numbers that the host had computed.
        arithmetic: what the kernel claims.
    """

    span: Span
    truth: Truth
    wide: Wide
    foreign: bool
    arithmetic: str

    def room(self) -> Tensor:
        """Largest difference that the claim allows; see `tolerance`."""
        return tolerance(self.truth, self.arithmetic)

    def wrong(self) -> Tensor:
        """Mask of the elements in which the formulas differ.

        Raises:
            CannotJudge: they differ, or nothing can be said, for want of a lifted value.
        """
        if self.wide.spoiled:
            raise CannotJudge(f"not liftable: {self._name()} derives from {self.wide.spoiled}")
        judged = torch.isfinite(self.truth.exact) & ~self.truth.zone
        close = (self.wide.value - self.truth.exact).abs() <= self.room()
        found = judged & ~close
        if bool((found & ~self.wide.stored).any()):
            raise CannotJudge(f"not liftable: no launch stores {self._name()}")
        if self.foreign and bool(found.any()):
            raise CannotJudge("not liftable: the kernel reads numbers that the host has computed")
        return found

    def _name(self) -> str:
        return f"{self.span.name}[{self.span.index}]"


@contextlib.contextmanager
def lifted(memory: GuardedMemory, wanted: bool) -> Iterator[Lift | None]:
    """Lift the launches inside the context, over the float tensors of its lists."""
    if not wanted:
        yield None
        return
    from twinstep.replay.shadow64.lift import lifting

    data: list[Tensor] = []
    others: list[Tensor] = []
    for span in memory.spans:
        tensor = span.of(memory.block)
        lists = not span.control and tensor.is_floating_point()
        (data if lists else others).append(tensor)
    with lifting(data, others) as lift:
        yield lift


def _agreed(case: Case, arithmetic: str) -> dict[tuple[str, int], Truth]:
    """The specification; nothing is said of elements that roundings of controls alone move.

    A kernel may form such numbers on the host, in fp32 or wider.
    """
    known = truths(case)
    read = [row for row in case.operation.controls if not row.output and row.name != "found_inf"]
    if sum(row.dtype == torch.float32 for row in read) < 2:
        return known
    other = truths(case, rounded=True)
    return {
        place: replace(truth, zone=truth.zone | ~_same(truth, other[place], arithmetic))
        for place, truth in known.items()
    }


def _same(truth: Truth, other: Truth, arithmetic: str) -> Tensor:
    same: Tensor = (truth.exact - other.exact).abs() <= tolerance(truth, arithmetic)
    return same


def formulated(
    wide: Mapping[tuple[str, int], Wide], foreign: bool, memory: GuardedMemory, arithmetic: str
) -> tuple[Formulated, ...]:
    """Everything the operation writes and has a formula for.

    Args:
        wide: what the kernel's formula gives, by argument and position.
        foreign: whether it used numbers that the host had computed.
        memory: of the call.
        arithmetic: what the kernel claims.

    Raises:
        CannotJudge: the reference cannot be evaluated without roundings.
    """
    try:
        known = _agreed(memory.case, arithmetic)
    except Exception as error:
        # A reference of somebody's own may use operations that no bound is known for.
        raise CannotJudge(f"the specification has no formula: {error}") from error
    found = []
    for span in memory.spans:
        truth = known.get((span.name, span.index))
        if truth is not None and span.value.numel():
            lifted_value = wide[span.name, span.index]
            found.append(Formulated(span, truth, lifted_value, foreign, arithmetic))
    return tuple(found)


def refusal(failure: str) -> None:
    """Raise where a lifted call failed; what a kernel raises by itself, the other laws see.

    Raises:
        CannotJudge: naming the instruction that cannot be lifted, or what else went wrong.
    """
    reason = failure.removeprefix("raises NotLiftable: ").partition(" [/")[0]
    if failure:
        raise CannotJudge(f"not liftable: {reason}")
