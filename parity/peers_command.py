"""`parity peers`: judge other projects and compare with what is known of them."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from parity.errors import EXIT_BROKEN, EXIT_KEPT, EXIT_TOO_LITTLE
from parity.peers.findings import idle, unexplained
from parity.peers.observe import Observation, observed
from parity.peers.page import FILE, page
from parity.peers.peer import Peer
from parity.peers.record import record
from parity.peers.shelves import peers


def judge_peers(package: str | None, write: bool) -> int:
    """Judge, print, and compare with the findings; the exit code."""
    screen = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    chosen = peers(package)
    seen = observed(chosen, told=lambda peer: screen.print(f"judging {peer.name}: {peer.says}"))
    screen.print(_table(chosen, seen))
    for peer in chosen:
        if peer.missing():
            screen.print(f"not judged: {peer.name}: {peer.missing()}")
    if write:
        record(chosen, seen)
        FILE.write_text(page())
    wrong = [*unexplained(seen), *idle(seen)]
    for sentence in wrong:
        screen.print(sentence, style="red")
    broken = sum(len(one.broken) for one in seen)
    kept = sum(len(one.kept) for one in seen)
    screen.print(f"{kept} laws kept, {broken} broken and explained in docs/peers.md", style="bold")
    if not seen:
        return EXIT_TOO_LITTLE
    return EXIT_BROKEN if wrong else EXIT_KEPT


def _table(chosen: list[Peer], seen: list[Observation]) -> Table:
    table = Table("peer", "operation", "dtype", "laws kept", "laws broken", "worst error/bound")
    by_name = {peer.name: peer for peer in chosen}
    for one in seen:
        table.add_row(
            one.peer,
            by_name[one.peer].operation,
            one.dtype,
            str(len(one.kept)),
            ", ".join(one.broken) or "-",
            f"{max(one.worst.values(), default=0.0):.2f}",
        )
    return table
