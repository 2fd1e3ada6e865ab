"""`parity peers`: judge other projects and compare with what is known of them."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from parity.errors import EXIT_BROKEN, EXIT_KEPT, EXIT_TOO_LITTLE, UsageError
from parity.peers.findings import idle, unexplained
from parity.peers.installed import is_installed
from parity.peers.live import CONFIGURATIONS, Agreement, compared
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
    agreement = _live(screen) if package != "torch" and is_installed("deepspeed") else None
    if write:
        if agreement is None:
            raise UsageError("--record needs deepspeed and every package: run make peers first")
        record(chosen, seen, agreement)
        FILE.write_text(page())
    wrong = [*unexplained(seen), *idle(seen), *(agreement.wrong if agreement else [])]
    for sentence in wrong:
        screen.print(sentence, style="red")
    broken = sum(len(one.broken) for one in seen)
    kept = sum(len(one.kept) for one in seen)
    screen.print(f"{kept} laws kept, {broken} broken and explained in docs/peers.md", style="bold")
    if not seen:
        return EXIT_TOO_LITTLE
    return EXIT_BROKEN if wrong else EXIT_KEPT


def _live(screen: Console) -> Agreement:
    """DeepSpeed's optimizers and the reference's over the same random runs."""
    screen.print(f"running DeepSpeed's optimizers beside ours: {CONFIGURATIONS} configurations")
    agreement = compared()
    screen.print(
        f"{agreement.steps} steps, {agreement.skipped} skipped: weights equal in "
        f"{agreement.exact} configurations, within the bound of their norm in {agreement.within}"
    )
    return agreement


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
