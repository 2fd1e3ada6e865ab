"""Judge the peers by every law and keep what was observed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from twinstep.parity.proof.peers.peer import Peer
from twinstep.parity.records.ledger import Cell, Status
from twinstep.parity.registry.selection import Selection
from twinstep.parity.runner.recipes import Effort
from twinstep.parity.runner.session import Session

VERDICT_ONLY = Effort(repros=None)
PLACE = re.compile(r" \[\S*:\d+\]$")  # where a peer raised: a path of this machine


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One peer on one dtype combination.

    Attributes:
        peer: its name.
        dtype: the dtype combination.
        kept: laws that held.
        broken: law -> the first line of the failure, shrunk.
        worst: largest error over derived bound in what was accepted, by written argument.
    """

    peer: str
    dtype: str
    kept: tuple[str, ...] = ()
    broken: dict[str, str] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)


def observed(
    chosen: Iterable[Peer],
    effort: Effort = VERDICT_ONLY,
    told: Callable[[Peer], None] = lambda peer: None,
) -> list[Observation]:
    """Judge each peer that is installed, on every dtype combination it has."""
    found = []
    for peer in chosen:
        if peer.missing():
            continue
        told(peer)
        row = peer.row()
        ledger = Session(selection=Selection(dtypes=peer.dtypes), effort=effort).run([row])
        for dtype in peer.dtypes:
            cells = [cell for key, cell in ledger.cells.items() if key.dtype == dtype]
            found.append(_observation(peer.name, dtype, cells))
    return found


def _observation(name: str, dtype: str, cells: list[Cell]) -> Observation:
    worst: dict[str, float] = {}
    for cell in cells:
        for argument, ratio in cell.worst.items():
            worst[argument] = max(worst.get(argument, 0.0), ratio)
    return Observation(
        peer=name,
        dtype=dtype,
        kept=tuple(cell.key.law for cell in cells if cell.status is Status.PASSED),
        broken={
            cell.key.law: PLACE.sub("", cell.failure.strip().splitlines()[0])
            for cell in cells
            if cell.status is Status.FAILED
        },
        worst=worst,
    )
