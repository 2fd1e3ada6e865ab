"""Two classes on all ranks of a world compared, and the groups that a difference has to do with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from twinstep.parity.sequences.observe import (
    MOVED,
    Difference,
    Observation,
    differences,
    furthest,
)
from twinstep.parity.sequences.over_ranks.drive import Calls, Seen, WorldRun
from twinstep.parity.sequences.over_ranks.place import place_text, places_of
from twinstep.parity.sequences.world import Act

PREFIX = "group "
# Path of a collective that ranks do not meet in, or of a rank that hangs.
STOPPED = "collectives"
TELLING = tuple(
    re.compile(text)
    for text in (
        *("outcome", STOPPED, r"optimizer\.overflow$", r"more\.readings", "optimizer"),
        *("grads", "params", ""),
    )
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The first action after which a rank differs from the reference's.

    Attributes:
        at: number of the action.
        rank: number of the rank.
        who: the rank with its place.
        difference: the path that tells most.
        want: all that can be seen of the reference there; empty where ranks came to a stop.
        groups: clause on collectives of both; empty if the reference called none.
        hints: sentences on other ranks.
    """

    at: int
    rank: int
    who: str
    difference: Difference
    want: Observation
    groups: str
    hints: tuple[str, ...]


def compared(
    acts: Sequence[Act],
    got: WorldRun,
    want: WorldRun,
) -> Found | None:
    """The first difference, if any.

    Args:
        acts: what was done.
        got: the class under judgement.
        want: its reference, which came to its end.
    """
    ranks = str(acts[0].values["ranks"])
    for at in range(len(acts)):
        rows = [(theirs[at : at + 1], ours[at]) for theirs, ours in both(got, want)]
        differs: list[tuple[Difference, int]] = []
        for rank, (theirs, ours) in enumerate(rows):
            difference = _of_rank(rank, theirs, ours, got.stopped)
            if difference is not None:
                differs.append((difference, rank))
        if differs:
            chosen, rank = min(differs, key=lambda pair: _place_of(pair[0]))
            return _found(at, rank, ranks, chosen, got, want)
    return None


def both(got: WorldRun, want: WorldRun) -> list[tuple[list[Seen], list[Seen]]]:
    """Observations of each rank on both sides."""
    return list(zip(got.ranks, want.ranks, strict=True))


def _of_rank(
    rank: int,
    theirs: Sequence[Seen],
    ours: Seen,
    stopped: dict[int, str],
) -> Difference | None:
    if not theirs:
        says = stopped.get(rank, "nothing: it has ended before")
        return Difference(STOPPED, says, _ended(ours))
    if theirs[0].broken and theirs[0].own and not ours.raised:
        return Difference("outcome", f"dict of 1: raised ({theirs[0].says})", _ended(ours))
    if theirs[0].broken:
        return Difference(STOPPED, theirs[0].broken, _ended(ours))
    found = differences(theirs[0].leaves, ours.leaves)
    return with_messages(furthest(found, _place_of), theirs[0], ours) if found else None


def _place_of(difference: Difference) -> tuple[bool, bool, int]:
    """Place in the order of what tells most: addresses last, what ranks agree on early."""
    elsewhere = "another rank" in difference.got
    return (
        difference.got == MOVED,
        elsewhere,
        next(at for at, row in enumerate(TELLING) if row.match(difference.path)),
    )


def _ended(seen: Seen) -> str:
    return f"raises {seen.says}" if seen.raised else "an action that ends"


def with_messages(difference: Difference, theirs: Seen, ours: Seen) -> Difference:
    """With the message, where one side raised."""
    if not difference.path.startswith("outcome"):
        return difference
    texts = [seen.says if seen.raised else "" for seen in (theirs, ours)]
    says = [f" ({text})" if text else "" for text in texts]
    return Difference(difference.path, difference.got + says[0], difference.want + says[1])


def _found(
    at: int, rank: int, ranks: str, difference: Difference, got: WorldRun, want: WorldRun
) -> Found:
    places, sizes = places_of(ranks)
    own = got.ranks[rank][at].calls if at < len(got.ranks[rank]) else ()
    wanted = want.ranks[rank][at]
    names = [place_text(number, place, sizes) for number, place in enumerate(places)]
    hints = [
        *_overflows([row[at] for row in want.ranks], names),
        *_of_another(difference, rank, [row[at] for row in want.ranks], got, at, names),
    ]
    return Found(
        at=at,
        rank=rank,
        who=names[rank],
        difference=difference,
        want=wanted.leaves,
        groups=groups_clause(own, wanted.calls),
        hints=tuple(hints),
    )


def _overflows(seen: Sequence[Seen], names: Sequence[str]) -> list[str]:
    where = [name for row, name in zip(seen, names, strict=True) if row.overflow]
    if not where:
        return []
    every = "every rank" if len(where) == len(names) else " and ".join(where)
    return [f"the overflow is on {every}"]


def _of_another(
    difference: Difference,
    rank: int,
    seen: Sequence[Seen],
    got: WorldRun,
    at: int,
    names: Sequence[str],
) -> list[str]:
    """Ranks whose value of the reference is the one that this rank has."""
    path = difference.path
    whole = path.rpartition("[")[0] if path not in seen[rank].leaves else path
    mine = got.ranks[rank][at].leaves.get(whole) if at < len(got.ranks[rank]) else None
    if mine is None or mine.tensor is None or mine.tensor.numel() == 0:
        return []
    same = []
    for number, row in enumerate(seen):
        other = row.leaves.get(whole)
        if number != rank and other is not None and other.tensor is not None:
            alike = other.says == mine.says and torch.equal(other.tensor, mine.tensor)
            same += [names[number]] if alike else []
    return [f"the reference has these values on {' and '.join(same)}"] if same else []


def groups_clause(got: Calls, want: Calls) -> str:
    """The first group over which a class calls less than its reference, else otherwise, or all."""
    groups = list(dict.fromkeys(group for group, _ in (*want, *got)))
    for group in sorted(
        groups, key=lambda group: len(_over(group, got)) >= len(_over(group, want))
    ):
        theirs, ours = _over(group, got), _over(group, want)
        if theirs != ours:
            return f"over {group} the class called {_listed(theirs)}, the reference {_listed(ours)}"
    named = list(dict.fromkeys(group.removeprefix(PREFIX) for group in groups))
    return f"both called the same over {' and '.join(named)}" if named else ""


def _over(group: str, calls: Calls) -> list[str]:
    return [call for where, call in calls if where == group]


def _listed(calls: Sequence[str]) -> str:
    counts = {call: calls.count(call) for call in calls}
    rows = [f"{call} {count} times" if count > 1 else call for call, count in counts.items()]
    return " and ".join(rows) or "nothing"
