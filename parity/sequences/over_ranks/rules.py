"""Actions that a wrapper's rules have over ranks alone, or have otherwise there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from twinstep.parity.ranks.arithmetic import ORDERS
from twinstep.parity.ranks.errors import CollectiveError
from twinstep.parity.sequences.actions import Action, action
from twinstep.parity.sequences.damage import HOW, damaged
from twinstep.parity.sequences.fills import Dice
from twinstep.parity.sequences.over_ranks.place import WORLDS, DrawnRank
from twinstep.parity.sequences.parts import SEEDS
from twinstep.parity.sequences.rules import OptimizerRules
from twinstep.parity.sequences.world import World

ALL = -1
ONE_OF = (ALL, ALL, *range(8))
# Arguments of `build` that draw the world.
DRAWN: dict[str, Any] = {"ranks": WORLDS, "order": tuple(ORDERS)}
# What has nothing to do with ranks.
ALONE = (
    *("fill_strangely", "watch", "start_scheduler", "scheduler_step", "step_with_closure"),
    # The default dtype is the process's, which all ranks share.
    *("construct_in_every_wrong_way", "copy", "train_by_default"),
)


def place_of(world: World) -> DrawnRank:
    """This rank."""
    return cast(DrawnRank, world.rank)


def chosen(world: World, on: int) -> bool:
    """True on the rank of that number, counted round, or on all of them."""
    place = place_of(world)
    return on == ALL or place.number == on % len(place.places)


class OverRanks(OptimizerRules):
    """Actions of all ranks together; in some, one rank has an argument of its own."""

    lasting, mean, around = (), 12, 12

    def actions(self) -> dict[str, Action]:
        """Every action but those that have nothing to do with ranks."""
        return {name: row for name, row in super().actions().items() if name not in ALONE}

    @action(seed=SEEDS, on=ONE_OF)
    def construct_wrongly(  # type: ignore[override]
        self, world: World, seed: int, on: int
    ) -> None:
        """Try to construct one with an argument that should be refused, on one rank or on all."""
        rows = [(name, value) for name, row in self.refused.items() for value in row]
        name, value = Dice(seed).pick(rows)
        self.construct(world, {name: value} if chosen(world, on) else {})

    @action(drives=("load_state_dict",), seed=SEEDS, how=HOW, on=ONE_OF)
    def load_damaged(  # type: ignore[override]
        self, world: World, seed: int, how: str, on: int
    ) -> None:
        """Try to load the state of now, of which one entry is wrong on one rank or on all."""
        self.save(world)
        state = self._read(world)
        one = damaged(state, seed, how) if chosen(world, on) else state
        self.load_on_all(world, lambda: self.enter(world, one), stays=False)

    def load_on_all(self, world: World, load: Callable[[], None], *, stays: bool) -> None:
        """Load; all ranks go on from what was saved where some alone refuse, as one part may.

        Also where all take it, unless what they have taken stays.
        """
        error: Exception | None = None
        try:
            load()
        except CollectiveError:
            raise
        except Exception as refusal:
            error = refusal
        refused = place_of(world).exchange(error is not None)
        if not all(refused) and (any(refused) or not stays):
            self.enter(world, self._read(world))
        if error is not None:
            raise error

    @action(often=2, number=range(4), on=ONE_OF)
    def forget(self, world: World, number: int, on: int) -> None:
        """A piece of a parameter has no gradient, as that of an expert without tokens."""
        place, param = place_of(world), world.params[number % len(world.params)]
        if on == ALL or place.holds_as(param, on):
            param.grad = None
