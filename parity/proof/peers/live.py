"""DeepSpeed's optimizers and the reference's, live, over random configurations.

With `Compat.deepspeed()` both sides agree after every step: scale, skipped steps and weights bit
for bit, norms within the bound of a sum of squares in fp32 (theirs is one, ours is exact). Where
the norm decides about the weights, those agree within what that bound allows.

Taking one field of `Compat` away at a time shows which of our choices is visible, and where.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Protocol

import torch

from twinstep.contract.compat import Compat
from twinstep.parity.proof.peers.live_config import Config, drawn
from twinstep.parity.proof.peers.live_run import Seen, ours, run, theirs

U = 2.0**-24  # half an ULP of fp32, relative
CONFIGURATIONS = 60
# Fields of FusedAdam, whose C++ these runs leave out: both sides step torch's optimizers.
OF_ADAM = ("shared_step_counter", "moments_in_param_dtype")
STEPS = 50


class Compared(Protocol):
    """A configuration, as far as a comparison asks for it."""

    @property
    def seed(self) -> int:
        """Number of the configuration."""

    @property
    def kind(self) -> str:
        """Words for messages."""

    @property
    def clips(self) -> bool:
        """True if a norm decides about the weights."""


@dataclass
class Agreement:
    """Agreement over all configurations.

    Attributes:
        kinds: kind of optimizer -> configurations.
        steps: steps taken.
        skipped: steps that both sides skipped.
        exact: configurations whose weights agree bit for bit.
        within: configurations whose weights agree within the bound, for they were clipped.
        worst_norm: largest relative distance of two norms, over its bound.
        worst_weight: largest distance of two masters of clipped runs, over its bound.
        visible: field of `Compat` -> what differs without it -> configurations.
        default_equal: configurations in which our default does what DeepSpeed does, bit for bit.
        default_differs: what differs in our default -> configurations.
        together: configurations where fields hide one another, and show only together.
        wrong: what disagrees with `Compat.deepspeed()`, one sentence each.
    """

    kinds: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    skipped: int = 0
    exact: int = 0
    within: int = 0
    worst_norm: float = 0.0
    worst_weight: float = 0.0
    visible: dict[str, dict[str, int]] = field(default_factory=dict)
    default_equal: int = 0
    default_differs: dict[str, int] = field(default_factory=dict)
    together: int = 0
    wrong: list[str] = field(default_factory=list)


def compared(
    seeds: Sequence[int] = range(CONFIGURATIONS),
    steps: int = STEPS,
    told: Callable[[Config], None] = lambda config: None,
) -> Agreement:
    """Run every configuration through both sides."""
    found = Agreement()
    for seed in seeds:
        config = drawn(seed, steps)
        told(config)
        their_run = run(config, theirs)
        our_run = run(config, partial(ours, compat=Compat.deepspeed()))
        _count(found, config, their_run, our_run)
        attribute(found, config, our_run)
    return found


def attribute(found: Agreement, config: Config, upstream: Sequence[Seen]) -> None:
    """Count what each field changes by itself, and what our default does, which is all of them."""
    showing = []
    for name in selectable():
        if name in OF_ADAM:
            continue
        without = replace(Compat.deepspeed(), **{name: False})
        differs = visible(upstream, run(config, partial(ours, compat=without)))
        _add(found.visible.setdefault(name, {}), differs)
        showing += [name] if differs else []
    differs = visible(upstream, run(config, partial(ours, compat=Compat())))
    found.default_equal += not differs
    _add(found.default_differs, differs)
    chosen = Compat(**dict.fromkeys(showing, True))
    left = visible(upstream, run(config, partial(ours, compat=chosen)))
    found.together += bool(left)


def _add(counts: dict[str, int], differs: Sequence[str]) -> None:
    for what in differs:
        counts[what] = counts.get(what, 0) + 1


def selectable() -> list[str]:
    """The fields that are on in `Compat.deepspeed()`."""
    chosen = Compat.deepspeed()
    return [row.name for row in fields(Compat) if getattr(chosen, row.name)]


def _count(found: Agreement, config: Config, them: Sequence[Seen], us: Sequence[Seen]) -> None:
    found.kinds[config.kind] = found.kinds.get(config.kind, 0) + 1
    found.steps += len(them)
    found.skipped += sum(one.skipped for one in them)
    worst_norm, worst_weight, wrong = disagreement(config, them, us)
    found.worst_norm = max(found.worst_norm, worst_norm)
    found.worst_weight = max(found.worst_weight, worst_weight)
    found.exact += not wrong and worst_weight == 0
    found.within += not wrong and worst_weight > 0
    found.wrong += wrong


def disagreement(
    config: Compared, them: Sequence[Seen], us: Sequence[Seen], roundings: int = 0
) -> tuple[float, float, list[str]]:
    """Largest distance of norms and of masters over their bounds, and what is beyond them.

    Args:
        config: of both runs.
        them: by step.
        us: by step.
        roundings: of a norm, beside those of a sum of squares.
    """
    worst_norm = worst_weight = allowed = 0.0
    where = f"configuration {config.seed} ({config.kind})"
    for step, (their, our) in enumerate(zip(them, us, strict=True)):
        at = f"{where}, step {step}"
        if (their.scale, their.skipped) != (our.scale, our.skipped):
            sentence = f"{at}: scale {their.scale}, skipped {their.skipped}; ours {our.scale}, "
            return worst_norm, worst_weight, [f"{sentence}{our.skipped}"]
        distance = _distance(their.norm, our.norm)
        limit = norm_bound(their.weights.numel() + 2 * roundings)
        worst_norm = max(worst_norm, distance / limit)
        if distance > limit:
            return worst_norm, worst_weight, [f"{at}: norm {their.norm}, ours {our.norm}"]
        gap = float((their.masters - our.masters).abs().max())
        if config.clips and not our.skipped:
            # The move carries the factor's relative error, and p is rounded at every step.
            largest = float(our.masters.abs().max())
            allowed += our.moved * (distance + 4 * U) + 2 * U * largest
        if gap > allowed or (gap == 0 and not torch.equal(their.weights, our.weights)):
            return worst_norm, worst_weight, [f"{at}: masters are {gap} apart, allowed {allowed}"]
        worst_weight = max(worst_weight, gap / allowed if allowed else 0.0)
    return worst_norm, worst_weight, []


def norm_bound(elements: int) -> float:
    """Relative error of an fp32 root of a sum of n squares in any order, and of what follows."""
    return (elements / 2 + 4) * U


def _distance(their: float | None, our: float | None) -> float:
    if their is None or our is None or their == our:
        return 0.0
    return abs(their - our) / abs(our) if our else float("inf")


def visible(one: Sequence[Seen], other: Sequence[Seen]) -> list[str]:
    """Kinds of difference between two of our own runs."""
    pairs = list(zip(one, other, strict=True))
    found = []
    if any((a.scale, a.skipped) != (b.scale, b.skipped) for a, b in pairs):
        found.append("scale or skipped steps")
    if any(a.norm != b.norm for a, b in pairs):
        found.append("norm")
    if any(not torch.equal(a.masters, b.masters) for a, b in pairs):
        found.append("weights")
    return found
