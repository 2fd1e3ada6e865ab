"""Laws across simulated ranks: a drawn world does what one rank with everything does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.plans import STEPS, Plan, Training, plans
from tests.helpers.profile import LONG
from tests.helpers.sides import SIDES, WRAPPERS
from twinstep.parity.ranks.world import Rank

pytestmark = pytest.mark.usefixtures("replay")
CELLS = [
    (kind, when)
    for kind in WRAPPERS
    for when in ("none", "before", "after", "all")
    if kind != "BF16Optimizer" or when in ("none", "before")
]


def trained(plan: Plan, side: str, rank: Rank | None) -> tuple[list[Any], Any]:
    """Agreed facts and weights after each step; masters and moments at the end."""
    training = Training(plan, side, rank)
    found = []
    for number in range(STEPS):
        training.step(number)
        found.append((training.agreed(), training.weights()))
    return found, training.masters()


@pytest.mark.parametrize(("kind", "when"), CELLS)
@settings(max_examples=150 if LONG else 3)
@given(data=st.data())
def test_a_world_does_what_one_rank_with_everything_does(
    kind: str, when: str, data: st.DataObject
) -> None:
    """Bit for bit: weights, masters, moments, counters, norm, scale and skipped steps."""
    plan = data.draw(plans(kind, when))
    steps, masters = trained(plan, "reference", None)
    skipped = [told["overflow"] == "True" for told, _ in steps]
    assert skipped == [bad is not None for bad in plan.bads]
    for side in SIDES:
        for found, own in plan.world.run(partial(trained, plan, side)):
            for (told, weights), (wanted, whole) in zip(found, steps, strict=True):
                assert told == wanted
                assert weights == {piece: whole[piece] for piece in weights}
            assert own == {piece: masters[piece] for piece in own}
