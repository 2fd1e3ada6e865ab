"""Laws that a reference keeps over ranks: copies are equal, facts are agreed, refusals are shared.

Both sides share some code, which a comparison of one with the other cannot judge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twinstep.parity.sequences.observe import differing
from twinstep.parity.sequences.over_ranks.drive import Seen, WorldRun
from twinstep.parity.sequences.over_ranks.model import EXPERTS
from twinstep.parity.sequences.over_ranks.place import place_text, places_of
from twinstep.parity.sequences.over_ranks.rules import ALL
from twinstep.parity.sequences.world import Act, Value

AGREED = "more.readings"
RENAMED = "construct_renamed"
OTHERWISE = "construct_otherwise"
# Actions in which something may be wrong on one rank alone.
BY_ONE = ("construct_wrongly", RENAMED, OTHERWISE, "refuse", "load_damaged", "load_universal")


def broken_law(acts: Sequence[Act], run: WorldRun) -> str:
    """The first law that is broken, in a sentence with rank and action; empty if all are kept.

    Args:
        acts: what was done.
        run: of a reference, which came to its end.
    """
    places, sizes = places_of(str(acts[0].values["ranks"]))
    names = [place_text(number, at, sizes) for number, at in enumerate(places)]
    built = not any(rows[0].raised for rows in run.ranks)
    split = sizes["data"] * sizes["expert"] > 1
    joined = _joined(acts[0].values, sizes)
    # In another order, tensor-parallel ranks add up gradients of their copies each in its own.
    exact = acts[0].values["order"] == "ranks"
    apart = [0 if exact else place["tensor"] for place in places]
    for at, act in enumerate(acts if built else ()):
        split, joined = (each and act.name != "recut" for each in (split, joined))
        rows = [ranks[at] for ranks in run.ranks]
        says = (
            _not_refused(act, rows, split)
            or (_refused_by_some(act, rows, names) if joined else "")
            or _of_copies(rows, names, apart)
        )
        if says:
            return f"{says} after {act}"
    return ""


def _joined(values: Mapping[str, Value], sizes: Mapping[str, int]) -> bool:
    """True if all ranks are connected by groups that the class is given."""
    experts = values["given"] in EXPERTS or sizes["expert"] > 1
    # Without an engine it is BF16Optimizer, whose masters are split over copies.
    split = values.get("engine", "leaves") == "leaves"
    return experts or split or sizes["data"] == 1


def _refused_by_some(act: Act, rows: Sequence[Seen], names: Sequence[str]) -> str:
    """Ranks refuse together what is wrong on one of them."""
    if act.name not in BY_ONE or len({row.raised for row in rows}) == 1:
        return ""
    raised = [name for name, row in zip(names, rows, strict=True) if row.raised]
    others = [name for name, row in zip(names, rows, strict=True) if not row.raised]
    return f"{raised[0]} refuses what {others[0]} takes"


def _not_refused(act: Act, rows: Sequence[Seen], split: bool) -> str:
    """Ranks that share masters refuse parameters of other names, and other options."""
    what = {RENAMED: "names of parameters", OTHERWISE: "options"}.get(act.name)
    if what is None or act.values["on"] == ALL or not split:
        return ""
    lenient = [number for number, row in enumerate(rows) if not row.raised]
    return f"rank {lenient[0]} takes other {what} on one rank" if lenient else ""


def _of_copies(rows: Sequence[Seen], names: Sequence[str], apart: Sequence[int]) -> str:
    """Ranks agree on readings, and those that hold the same piece of a parameter on its bits.

    Each part of a world that has been cut does so by itself.
    """
    first: dict[tuple[str, int, int, int], int] = {}
    for number, row in enumerate(rows):
        for path, leaf in row.leaves.items():
            if not (path.startswith(AGREED) or path in row.pieces):
                continue
            weight = path in row.pieces
            held = (row.pieces[path], apart[number]) if weight else (0, 0)
            key = (path, *held, row.apart)
            other = first.setdefault(key, number)
            there = rows[other].leaves.get(path)
            alike = there is not None and there.says.split(",")[0] == leaf.says.split(",")[0]
            if there is not None and there.tensor is not None and leaf.tensor is not None:
                alike = alike and not bool(differing(leaf.tensor, there.tensor).any())
            if not alike:
                return f"{names[number]} and {names[other]} have another {path}"
    return ""
