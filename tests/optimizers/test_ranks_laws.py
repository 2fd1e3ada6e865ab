"""Laws across simulated ranks: a drawn world does what one rank with everything does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.plans import STEPS, Plan, Training, plans
from tests.helpers.profile import LONG
from tests.helpers.sides import SIDES, WRAPPERS
from twinstep.parity.ranks.world import Rank

pytestmark = pytest.mark.usefixtures("replay")


def trained(plan: Plan, side: str, rank: Rank | None) -> tuple[list[Any], Any]:
    """Agreed facts and weights after each step; masters and moments at the end."""
    training = Training(plan, side, rank)
    found = []
    for number in range(STEPS):
        training.step(number)
        found.append((training.agreed(), training.weights()))
    return found, training.masters()


@pytest.mark.parametrize("kind", WRAPPERS)
@settings(max_examples=350 if LONG else 7)
@given(data=st.data())
def test_a_world_does_what_one_rank_with_everything_does(kind: str, data: st.DataObject) -> None:
    """Bit for bit: weights, masters, moments, counters, norm, scale and skipped steps."""
    plan = data.draw(plans(kind))
    side = data.draw(st.sampled_from(SIDES))
    steps, masters = trained(plan, "reference", None)
    for found, own in plan.world.run(lambda rank: trained(plan, side, rank)):
        for (told, weights), (wanted, whole) in zip(found, steps, strict=True):
            assert told == wanted
            assert weights == {piece: whole[piece] for piece in weights}
        assert own == {piece: masters[piece] for piece in own}
