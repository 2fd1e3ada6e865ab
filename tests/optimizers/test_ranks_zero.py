"""Laws of ZeroOptimizer over ranks: a drawn world does what one rank with everything does."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.profile import LONG
from tests.helpers.sides import SIDES
from tests.helpers.zero_built import SIDE, built, seen
from tests.helpers.zero_plans import STEPS, Training, ZeroPlan, axes_of, key, zero_plans
from twinstep.parity.cases.fixed_inputs import bits, words
from twinstep.parity.ranks.arithmetic import ORDERS
from twinstep.parity.ranks.world import Rank, World

pytestmark = pytest.mark.usefixtures("replay")
COUNTS = (1, 2, 3, 4, 7, 8)
# Ranks along the expert and the tensor axis.
OTHERS = ((1, 1), (2, 1), (1, 2))
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def trained(plan: ZeroPlan, side: str, rank: Rank | None) -> tuple[list[Any], Any]:
    """Agreed facts and weights after each step; masters and moments at the end."""
    training = Training(plan, side, rank)
    found: list[Any] = []
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
    steps, masters = trained(plan, "reference", None)
    skipped = [told["overflow"] == "True" for told, _ in steps]
    assert skipped == [bad is not None for bad in plan.bads]
    for side in SIDES:
        for found, own in plan.world.run(partial(trained, plan, side)):
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
    sides = data.draw(st.tuples(*[st.sampled_from(SIDES)] * 2))

    def save(rank: Rank) -> Any:
        training = Training(before, sides[0], rank)
        for number in range(at):
            training.step(number)
        return training.optimizer.state_dict()

    saved = before.world.run(save)

    def go_on(rank: Rank) -> tuple[Any, Any, Any]:
        training = Training(after, sides[1], rank)
        own = saved[rank.place["tensor"] :: others[1]]
        training.optimizer.load_state_dict(own, load_from_fp32_weights=True)
        for number in range(at, STEPS):
            training.step(number)
        return training.agreed(), training.weights(), training.masters()

    found = after.world.run(go_on)
    whole = Training(before, "reference", None)
    for number in range(STEPS):
        whole.plan = before if number < at else after
        whole.step(number)
    wanted, weights, masters = whole.agreed(), whole.weights(), whole.masters()
    for told, own_weights, own_masters in found:
        assert told == wanted
        assert own_weights == {piece: weights[piece] for piece in own_weights}
        assert own_masters == {piece: masters[piece] for piece in own_masters}


# Orders in which all elements of a message are added up alike, however they are cut.
ALIKE = ("ranks", "tree", "halving")


def rounded(given: dict[str, Any], side: str, rank: Rank) -> list[Any]:
    """Facts of each step, whose gradients are rounded wherever they are added up or divided."""
    SIDE.set(side)
    sizes, dtype, micros = given["sizes"], given["dtype"], given["micros"]
    group = rank.group("data")
    params, optimizer = built(group, sizes, dtype=dtype, inside="FusedAdam", **given["options"])
    found: list[Any] = []
    for number in range(2):
        for micro in range(micros):
            loss = torch.zeros((), requires_grad=True) * 1.0
            for slot in given["arrival"][rank.number % 2]:
                drawn = words(sizes[slot], key(slot, number, micro, rank.number))
                grad = (torch.tensor([float(word % 2**24) for word in drawn]) - 2.0**23) * 2.0**-20
                if slot != given["unused"][rank.number % 2]:
                    loss = loss + (params[slot] * grad.to(dtype)).float().sum()
            optimizer.backward(loss)
        found.append([bits(optimizer.get_full_hp_grad(f"p{at}")) for at in range(len(sizes))])
        optimizer.step()
        found.append(seen(params, optimizer))
        # Padding as well.
        found.append([bits(flat) for flat in optimizer.bit16_groups_flat])
    return found


@st.composite
def roundings(draw: st.DrawFn, whole: bool) -> dict[str, Any]:
    """Arguments of `rounded`; each group in one bucket, or in several."""
    sizes = draw(st.lists(st.sampled_from([0, 1, 3, 5, 8, 17]), min_size=3, max_size=6))
    dtypes = st.sampled_from(DTYPES)
    slots = list(range(len(sizes)))
    options: dict[str, Any] = {
        "partition_grads": draw(st.booleans()),
        "split": draw(st.sampled_from([None, 1])),
        "round_robin_gradients": draw(st.booleans()),
        "overlap_comm": draw(st.booleans()),
        "reduce_bucket_size": 10**6 if whole else draw(st.sampled_from([1, 6, 20])),
        "contiguous_gradients": whole or draw(st.booleans()),
        "gradient_accumulation_dtype": draw(dtypes),
        "communication_data_type": draw(st.sampled_from([None, *DTYPES])),
        "clip_grad": draw(st.sampled_from([0.0, 1.0])),
        "offload_optimizer_config": draw(st.sampled_from([None, SimpleNamespace(device="cpu")])),
    }
    kinds: dict[str, dict[str, Any]] = {
        "scatter": {},
        "reduce": {"reduce_scatter": False},
        "before": {"reduce_scatter": False, "postscale_gradients": False},
        "after": {"reduce_scatter": False, "gradient_predivide_factor": 3.0},
        "sum": {"gradient_average": False},
    }
    options |= kinds[draw(st.sampled_from(list(kinds)))]
    return {
        "sizes": tuple(sizes),
        "dtype": draw(dtypes),
        "micros": draw(st.integers(1, 3)),
        "options": options,
        # Of even and odd ranks.
        "arrival": [draw(st.permutations(slots)), draw(st.permutations(slots))],
        "unused": [draw(st.sampled_from([None, *slots])) for _ in range(2)],
    }


@pytest.mark.parametrize("whole", [True, False])
@settings(max_examples=300 if LONG else 8)
@given(data=st.data())
def test_both_sides_round_alike_in_one_world(whole: bool, data: st.DataObject) -> None:
    """Bit for bit where the order of ranks does not depend on how messages are cut."""
    given = data.draw(roundings(whole))
    order = data.draw(st.sampled_from(sorted(ORDERS) if whole else ALIKE))
    count, late = data.draw(st.sampled_from(COUNTS)), data.draw(st.booleans())
    world = World(count, data.draw(st.integers(0, 999)), order, late, patience=30.0)
    one, other = (world.run(partial(rounded, given, side)) for side in SIDES)
    assert one == other
