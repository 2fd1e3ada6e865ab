"""Faults of one rank in a drawn training: an error on every other rank, and a resume to the bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.plans import STEPS, Plan, Training, plans
from tests.helpers.profile import LONG
from tests.helpers.sides import SIDES
from twinstep.parity.ranks.errors import MismatchedCalls, RankLost, RanksFailed
from twinstep.parity.ranks.world import Rank

pytestmark = pytest.mark.usefixtures("replay")


class Own(Exception):
    """A rank's own error."""


class Returned(Exception):
    """A rank's early end."""


def raises(training: Training) -> None:
    raise Own("of its own")


def stalls(training: Training) -> None:
    assert training.rank is not None
    training.rank.stall()


def returns(training: Training) -> None:
    raise Returned


def asks_for_a_closure(training: Training) -> None:
    training.optimizer.step(lambda: 0.0)


def has_a_sparse_gradient(training: Training) -> None:
    for param in training.params.values():
        param.grad = torch.zeros_like(param).to_sparse()
    if training.plan.kind == "BF16Optimizer":
        training.optimizer.update_hp_grads()
    training.optimizer.step()


def calls_another_collective(training: Training) -> None:
    dist.broadcast(torch.zeros(2), 0)


def sends_another_shape(training: Training) -> None:
    dist.all_reduce(torch.zeros(99))


FAULTS: dict[Callable[[Training], None], type[Exception] | None] = {
    raises: Own,
    stalls: RankLost,
    returns: None,
    asks_for_a_closure: RuntimeError,
    has_a_sparse_gradient: RuntimeError,
    calls_another_collective: MismatchedCalls,
    sends_another_shape: MismatchedCalls,
}


@dataclass(frozen=True)
class Faulty:
    """A plan, and a rank that does something else once.

    Attributes:
        plan: of the training.
        side: that trains.
        resumed: side that resumes.
        fault: of one rank.
        rank: that has it.
        step: at which; the last state dict of all ranks was taken before it.
        between: gradients have been added up when it happens.
    """

    plan: Plan
    side: str
    resumed: str
    fault: Callable[[Training], None]
    rank: int
    step: int
    between: bool


@st.composite
def faulty(draw: st.DrawFn) -> Faulty:
    plan = draw(plans().filter(lambda plan: plan.world.size > 1))
    return Faulty(
        plan,
        draw(st.sampled_from(SIDES)),
        draw(st.sampled_from(SIDES)),
        draw(st.sampled_from(list(FAULTS))),
        draw(st.integers(0, plan.world.size - 1)),
        draw(st.integers(0, STEPS - 1)),
        draw(st.booleans()),
    )


def seen(training: Training) -> tuple[Any, ...]:
    return training.agreed(), training.weights(), training.masters()


def alone(plan: Plan) -> tuple[Any, ...]:
    """The end of the uninterrupted run, on one rank with everything."""
    training = Training(plan, "reference", None)
    for step in range(STEPS):
        training.step(step)
    return seen(training)


def same_as_alone(plan: Plan, found: list[tuple[Any, ...]]) -> None:
    """Compare every rank's end with that of the uninterrupted run."""
    wanted, *wholes = alone(plan)
    for told, *parts in found:
        assert told == wanted
        for part, whole in zip(parts, wholes, strict=True):
            assert part == {piece: whole[piece] for piece in part}


@settings(max_examples=1000 if LONG else 14)
@given(run=faulty())
def test_a_fault_is_an_error_of_all_other_ranks_and_a_resume_gives_the_uninterrupted_bits(
    run: Faulty,
) -> None:
    plan, threads = run.plan, set(threading.enumerate())
    kept: list[list[Any]] = [[] for _ in plan.places]

    def train(rank: Rank) -> None:
        training = Training(plan, run.side, rank)
        for step in range(run.step + 1):
            kept[rank.number].append(training.optimizer.state_dict())
            dist.barrier()
            here = (rank.number, step) == (run.rank, run.step)
            if here and not run.between:
                run.fault(training)
            training.accumulate(step)
            if here and run.between:
                run.fault(training)
            training.optimizer.step()
        dist.barrier()

    def ending(rank: Rank) -> None:
        try:
            train(rank)
        except Returned:
            return

    with pytest.raises(RanksFailed) as caught:
        plan.world.run(ending)
    assert set(threading.enumerate()) == threads
    errors = caught.value.errors
    own, kind = errors.pop(run.rank, None), FAULTS[run.fault]
    assert own is None if kind is None else isinstance(own, kind | RankLost)
    assert sorted(errors) == [number for number in range(len(kept)) if number != run.rank]
    # A refusal meets gradients, where the others have not added them up yet.
    meets = kind is MismatchedCalls or (kind is RuntimeError and not run.between)
    for number, error in errors.items():
        if kind is RuntimeError and isinstance(error, ValueError):
            assert "another rank" in str(error)
            continue
        assert isinstance(error, (RankLost, MismatchedCalls) if meets else RankLost), error
        assert error.rank == number
        assert "come no further" not in str(error)
        assert len(str(error).splitlines()) == 1
    if kind in (Own, RankLost, RuntimeError) or kind is None:
        named = (f"rank {run.rank} ", f"another rank ({run.rank})", "another rank cannot")
        assert any(each in str(error) for error in errors.values() for each in named)

    def resume(rank: Rank) -> tuple[Any, ...]:
        training = Training(plan, run.resumed, rank)
        training.load([entries[run.step] for entries in kept])
        for step in range(run.step, STEPS):
            training.step(step)
        return seen(training)

    same_as_alone(plan, plan.world.run(resume))


NAMED = {
    "norm": "norm_type=-1.0",
    "layout": "digest of the names",
    "masters": "fp32_groups",
    "clip_grad": "clip_grad is",
    "cur_scale": "loss scale is",
    "scale": "loss scale ",
}


@st.composite
def refused(draw: st.DrawFn) -> tuple[Plan, str, str, int]:
    """A plan, a side, what one rank has otherwise than the others, and that rank."""
    plan = draw(plans().filter(lambda plan: plan.world.size > 1 and plan.coupled))
    bf16 = plan.kind == "BF16Optimizer"
    replicas = plan.axes[0] * plan.axes[1]
    what = ["norm", "clip_grad", "masters"]
    what += ["layout"] * (bf16 and replicas > 1) + ["cur_scale", "scale"] * (not bf16)
    rank = draw(st.integers(0, plan.world.size - 1))
    return plan, draw(st.sampled_from(SIDES)), draw(st.sampled_from(what)), rank


def spoilt(entry: dict[str, Any], what: str) -> dict[str, Any]:
    """A state dict of another clip norm or scale, or without masters."""
    if what == "masters":
        return {key: value for key, value in entry.items() if "fp32_groups" not in key}
    return {**entry, what: entry[what] + 1.0} if what in entry else entry


def steps_by_another_scale(training: Training, factor: float) -> None:
    """Take a step with another scale, and read what tells of it; the scale is restored."""
    scale = training.optimizer.loss_scale
    try:
        training.optimizer.loss_scale = factor * scale
        training.step(1)
        assert training.optimizer.overflow in (True, False)
    finally:
        training.optimizer.loss_scale = scale


@settings(max_examples=300 if LONG else 9)
@given(drawn=refused())
def test_what_one_rank_has_otherwise_is_refused_by_all_and_changes_nothing(
    drawn: tuple[Plan, str, str, int],
) -> None:
    plan, side, what, wrong = drawn
    at_construction = what in ("norm", "layout")

    def train(rank: Rank) -> tuple[str, tuple[Any, ...]]:
        here = rank.number == wrong
        if at_construction:
            with pytest.raises(ValueError) as caught:  # noqa: PT011 - the sentence is checked below
                Training(plan, side, rank, wrong=what if here else "")
        training = Training(plan, side, rank)
        training.step(0)
        if not at_construction:
            kept: list[Any] = [None] * plan.world.size
            dist.all_gather_object(kept, training.optimizer.state_dict())
            before = seen(training)
            refuse = partial(training.load, [spoilt(e, what) for e in kept] if here else kept)
            if what == "scale":
                refuse = partial(steps_by_another_scale, training, 2.0 if here else 1.0)
            with pytest.raises(ValueError) as caught:  # noqa: PT011 - the same
                refuse()
            # A step that is refused has a norm, and gradients.
            assert seen(training)[what == "scale" :] == before[what == "scale" :]
        for step in range(1, STEPS):
            training.step(step)
        return str(caught.value), seen(training)

    said, found = zip(*plan.world.run(train), strict=True)
    same_as_alone(plan, list(found))
    sentences = [text for number, text in enumerate(said) if number != wrong]
    assert all("another" in text and len(text.splitlines()) == 1 for text in sentences)
    assert NAMED[what] in said[wrong]
