"""Carry out a sequence of actions on every rank of a simulated world, and record what is seen."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from twinstep.parity.ranks.errors import CollectiveError, RanksFailed
from twinstep.parity.ranks.world import Rank
from twinstep.parity.ranks.world import World as Ranks
from twinstep.parity.sequences.observe import Leaf, Observation
from twinstep.parity.sequences.over_ranks.place import MEETING, DrawnRank, axes_of
from twinstep.parity.sequences.world import Act, World

PATIENCE = 30.0
# A rank that waits in the judge's own barrier has ended its action.
ENDED = re.compile(rf"waits in barrier\(\) on group {MEETING} of ranks \d+(, \d+)*")
HERE = re.compile(rf"(.*), and does not come \[rank \d+, group {MEETING} .*\]", re.DOTALL)
Calls = tuple[tuple[str, str], ...]


class OneRank(Protocol):
    """A class that is driven on one rank."""

    world: World | None
    outcome: dict[str, object]
    error: Exception | None

    def carry_out(self, act: Act) -> None:
        """Carry out one action; an exception is an outcome like any other."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One rank after one action.

    Attributes:
        leaves: all that can be seen; copies.
        raised: whether the action raised.
        says: the last error, with its message.
        calls: groups and collectives of the action, in order.
        overflow: whether some gradient was not finite right before the update.
        broken: error of a collective that ranks do not meet in, after which nothing is done.
        own: whether the action raised an error that is not about other ranks.
        pieces: by path of a parameter, number of the piece that the rank holds.
        apart: number of the part of the world that the rank is in, where it has been cut.
    """

    leaves: Observation
    raised: bool
    says: str
    calls: Calls
    overflow: bool = False
    broken: str = ""
    own: bool = False
    pieces: Mapping[str, int] = field(default_factory=dict)
    apart: int = 0


@dataclass(kw_only=True)
class WorldRun:
    """One class on all ranks of a world.

    Attributes:
        ranks: observations by rank, one for each action; fewer where it has come to a stop.
        stopped: error by rank that ended it: a hang, or a collective left behind.
        errors: that actions ended with.
    """

    ranks: list[list[Seen]]
    stopped: dict[int, str] = field(default_factory=dict)
    errors: list[Exception] = field(default_factory=list)


def carried_out(
    acts: Sequence[Act],
    side_on: Callable[[DrawnRank], OneRank],
    seen: Callable[[OneRank], Observation],
) -> WorldRun:
    """Carry the actions out on all ranks of the world that the first one draws.

    Args:
        acts: the first builds, and has the arguments `ranks`, `order` and `seed` of the world.
        side_on: makes the side of one rank.
        seen: observes it.
    """
    values = acts[0].values
    drawn, seed = str(values["ranks"]), int(values["seed"])
    order, late = str(values["order"]), seed % 2 == 1
    ranks = Ranks(axes_of(drawn), seed, order, late, PATIENCE)
    found = WorldRun(ranks=[[] for _ in range(ranks.size)])
    board: dict[int, object] = {}

    def one(rank: Rank) -> None:
        place = DrawnRank(rank, drawn, board)
        side, rows = side_on(place), found.ranks[rank.number]
        for act in acts:
            row = _one_action(act, side, seen, place)
            found.errors += [side.error] if row.raised and side.error is not None else []
            rows.append(row)
            if row.broken:
                return

    try:
        ranks.run(one)
    except RanksFailed as failed:
        found.stopped = {number: told(error) for number, error in failed.errors.items()}
    return found


def _one_action(
    act: Act, side: OneRank, seen: Callable[[OneRank], Observation], place: DrawnRank
) -> Seen:
    """One action of one rank, which all ranks end before the next begins."""
    sent, hit = place.rank.sent, list[bool]()
    before = len(sent)
    if side.world is not None:
        world = side.world
        world.updating = lambda: hit.append(overflows(world))
    side.carry_out(act)
    calls = tuple(
        (each.where, called(each.collective, each.operation))
        for each in sent[before:]
        if MEETING not in each.where and "," in each.where
    )
    broken = ""
    error = side.error if "raised" in side.outcome else None
    try:
        if isinstance(error, CollectiveError):
            raise error
        place.meet()
    except CollectiveError as failure:
        broken = told(failure)
    params = [] if side.world is None else side.world.params
    pieces = {f"params[{index}]": place.piece(param) for index, param in enumerate(params)}
    says = f"{type(side.error).__name__}: {side.error}" if side.error is not None else ""
    return Seen(
        leaves={} if broken else copies(seen(side)),
        raised="raised" in side.outcome,
        says=says,
        calls=calls,
        overflow=any(hit),
        broken=broken,
        own=error is not None and not isinstance(error, CollectiveError),
        pieces=pieces,
        apart=place.apart,
    )


def called(collective: str, operation: str) -> str:
    """A collective with its operation."""
    return f"{collective}({operation})" if operation else collective


def told(error: BaseException) -> str:
    """An error of the simulator; who waits for the next action has ended this one."""
    text = ENDED.sub("has ended the action", str(error))
    waiting = HERE.fullmatch(text)
    return f"the action has ended here, but {waiting[1]}" if waiting else text


def overflows(world: World) -> bool:
    """True if a gradient of this rank is not finite."""
    grads = [param.grad for param in world.params if param.grad is not None]
    return any(not bool(torch.isfinite(grad.to_dense()).all()) for grad in grads)


def copies(leaves: Observation) -> Observation:
    """The observation with tensors that nothing else writes into."""
    return {
        path: leaf if leaf.tensor is None else Leaf(leaf.says, leaf.tensor.clone(), leaf.moved)
        for path, leaf in leaves.items()
    }
