"""Laws of ZeroOptimizer over ranks: a drawn world does what one rank with everything does."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.profile import LONG
from tests.helpers.zero_plans import STEPS, Training, ZeroPlan, axes_of, zero_plans
from twinstep.parity.ranks.world import Rank

COUNTS = (1, 2, 3, 4, 7, 8)
# Ranks along the expert and the tensor axis.
OTHERS = ((1, 1), (2, 1), (1, 2))
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def trained(plan: ZeroPlan, rank: Rank | None) -> tuple[list[Any], Any]:
    """Agreed facts and weights after each step; masters and moments at the end."""
    training = Training(plan, rank)
    found = []
    for number in range(STEPS):
        training.step(number)
        found.append((training.agreed(), training.weights()))
    return found, training.masters()


@pytest.mark.parametrize("count", COUNTS)
@settings(max_examples=200 if LONG else 3)
@given(data=st.data())
def test_a_world_does_what_fp16_optimizer_does_on_one_rank(count: int, data: st.DataObject) -> None:
    """Bit for bit, whatever the stage, order, buckets, micro-batches, dtypes and options.

    Weights, masters, moments, counters, norm, scale and skipped steps, on every rank.
    """
    axes = data.draw(st.sampled_from(axes_of(count)))
    dtype = data.draw(st.sampled_from(DTYPES))
    plan = data.draw(zero_plans(axes, dtype, data.draw(st.booleans())))
    steps, masters = trained(plan, None)
    skipped = [told["overflow"] == "True" for told, _ in steps]
    assert skipped == [bad is not None for bad in plan.bads]
    for found, own in plan.world.run(partial(trained, plan)):
        for (told, weights), (wanted, whole) in zip(found, steps, strict=True):
            assert told == wanted
            assert weights == {piece: whole[piece] for piece in weights}
        assert own == {piece: masters[piece] for piece in own}


@settings(max_examples=300 if LONG else 8)
@given(data=st.data())
def test_a_run_goes_on_with_its_bits_on_another_number_of_ranks(data: st.DataObject) -> None:
    """Edges CK-3 to CK-5 and CK-9: saved by parameter, loaded by any number of ranks."""
    others, dtype = data.draw(st.sampled_from(OTHERS)), data.draw(st.sampled_from(DTYPES))
    counts = (1, 2, 3) if math.prod(others) > 1 else COUNTS
    parts = []
    for name in ("saved", "loaded"):
        ranks = data.draw(st.sampled_from(counts), name)
        bad = data.draw(st.booleans())
        parts.append(data.draw(zero_plans((ranks, *others), dtype, bad)))
    before, after = parts[0], replace(parts[1], clip=parts[0].clip)
    at = data.draw(st.integers(0, STEPS - 1))

    def save(rank: Rank) -> Any:
        training = Training(before, rank)
        for number in range(at):
            training.step(number)
        return training.optimizer.state_dict()

    saved = before.world.run(save)

    def go_on(rank: Rank) -> tuple[Any, Any, Any]:
        training = Training(after, rank)
        own = saved[rank.place["tensor"] :: others[1]]
        training.optimizer.load_state_dict(own, load_from_fp32_weights=True)
        for number in range(at, STEPS):
            training.step(number)
        return training.agreed(), training.weights(), training.masters()

    found = after.world.run(go_on)
    whole = Training(before, None)
    for number in range(STEPS):
        whole.plan = before if number < at else after
        whole.step(number)
    wanted, weights, masters = whole.agreed(), whole.weights(), whole.masters()
    for told, own_weights, own_masters in found:
        assert told == wanted
        assert own_weights == {piece: weights[piece] for piece in own_weights}
        assert own_masters == {piece: masters[piece] for piece in own_masters}
