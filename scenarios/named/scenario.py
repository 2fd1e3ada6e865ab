"""Scenarios as data: what is run, what happens in which step, and what must hold of the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from twinstep.parity.records.errors import UsageError
from twinstep.scenarios.model import Shape
from twinstep.scenarios.plan import Plan
from twinstep.scenarios.trace import Trace

SMALL = Shape(width=8, layers=1, context=16)
LAST = -1  # of the micro-batches: one of the last rank


@dataclass(frozen=True)
class Fault:
    """Gradients of some steps, multiplied by a factor where they arrive; infinite and NaN are set.

    Attributes:
        steps: counted from 1.
        factor: infinity and NaN replace the first element of each gradient.
        micro: number of the micro-batch over all ranks, `LAST` or None for each.
        only: of weights with this in their name.
    """

    steps: Sequence[int]
    factor: float = math.inf
    micro: int | None = LAST
    only: str = ""


@dataclass(frozen=True)
class Change:
    """A hyper-parameter that has another value from a step on.

    Attributes:
        step: the first with the new value.
        name: "lr" (a factor), "weight_decay", "clip_grad" or "loss_scale".
        value: the new one.
    """

    step: int
    name: str
    value: float


@dataclass(frozen=True)
class Restart:
    """The end of all processes in the middle of a step; others go on from the last checkpoint.

    Attributes:
        step: at which a rank fails, after its backward pass.
        saved: the step after which the checkpoint was written.
        ranks: that go on, as a share of those at first; the micro-batches stay the same.
        other_side: the other side goes on.
    """

    step: int
    saved: int
    ranks: float = 1.0
    other_side: bool = False


@dataclass(frozen=True)
class Frozen:
    """Weights with this in their name that need no gradient until a step."""

    only: str
    until: int


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Facts of one step that its record does not have.

    Attributes:
        moved: names of weights whose masters changed.
        touched: names of weights with a gradient other than zero, on any rank.
        overflowed: whether any gradient was infinite or NaN, on any rank.
        reach: largest change of a master but for decay, divided by the learning rate.
        rounded: whether all model weights are their masters, rounded.
        finite: whether all masters are finite.
        kept: digest of all that the optimizer keeps.
        norm64: norm of the sum of all unscaled gradients, in float64.
    """

    moved: frozenset[str]
    touched: frozenset[str]
    overflowed: bool
    reach: float
    rounded: bool
    finite: bool
    kept: str
    norm64: float


@dataclass(frozen=True)
class Outcome:
    """A run that has ended, and what its laws may look at.

    Attributes:
        scenario: that was run.
        plan: of the run.
        trace: of its steps.
        seen: facts of each.
        twin: trace of the same plan in which nothing happens, or another plan; None without one.
    """

    scenario: Scenario
    plan: Plan
    trace: Trace
    seen: Sequence[Seen]
    twin: Trace | None = None


@dataclass(frozen=True)
class Law:
    """A fact that must hold of a run, and a check of it.

    Attributes:
        claim: the fact, as a sentence.
        broken: how the run breaks it, as a sentence; None where it holds.
    """

    claim: str
    broken: Callable[[Outcome], str | None]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One row of the table.

    Attributes:
        name: of the command.
        about: what happens, as a sentence.
        laws: that hold in it, beside those of all.
        plan: fields of `Plan` that it sets.
        dtypes: that it can be run in, the default first.
        ranks: of a run, by default.
        micro_batches: of a step; 0 is one for each rank.
        faults: of gradients.
        changes: of hyper-parameters.
        restarts: from checkpoints.
        frozen: weights that are trained later.
        twin: fields of `Plan` in which the other run differs; None without another run.
        least: steps without which the laws have nothing to hold of.
    """

    name: str
    about: str
    laws: Sequence[Law] = ()
    plan: Mapping[str, object]
    dtypes: Sequence[str] = ("fp16",)
    ranks: int = 1
    micro_batches: int = 0
    faults: Sequence[Fault] = ()
    changes: Sequence[Change] = ()
    restarts: Sequence[Restart] = ()
    frozen: Sequence[Frozen] = ()
    twin: Mapping[str, object] | None = None
    least: int = 40

    def plan_of(self, dtype: str | None, steps: int | None, ranks: int) -> Plan:
        """The plan of a run.

        Raises:
            UsageError: the scenario does not have this dtype, or needs more steps.
        """
        dtype = dtype or self.dtypes[0]
        if dtype not in self.dtypes:
            raise UsageError(f"dtype={dtype!r}, but should be one of {[*self.dtypes]} [--dtype]")
        micro_batches = self.micro_batches or ranks
        if micro_batches % ranks:
            raise UsageError(
                f"ranks={ranks}, but should divide the {micro_batches} micro-batches of a step "
                "[--ranks]"
            )
        if any(ranks * restart.ranks % 1 for restart in self.restarts):
            raise UsageError(f"ranks={ranks}, but should be a multiple of 4 [--ranks]")
        given = {"optimizer": "adam", "rule": "wrapper", "steps": 60, "scale_window": 8}
        given |= {"first_scale": 2.0**10, "held_out": 4, "warm_up": 5, "shape": SMALL}
        given |= {**self.plan, "dtype": dtype, "accumulate": micro_batches}
        found = Plan(**given)  # type: ignore[arg-type]
        if steps is None:
            return found
        if steps < self.least:
            raise UsageError(f"steps={steps}, but should be at least {self.least} [--steps]")
        return replace(found, steps=steps)

    @property
    def undisturbed(self) -> Scenario:
        """The same without anything that happens."""
        return replace(self, faults=(), changes=(), restarts=(), frozen=())
