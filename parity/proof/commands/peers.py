"""`parity peers`: judge other projects and compare with what is known of them."""

from __future__ import annotations

import sys

import torch
from rich.console import Console
from rich.table import Table

from twinstep.parity.proof.peers import zero_live
from twinstep.parity.proof.peers.edge_list import contradictions, run_all, scenes
from twinstep.parity.proof.peers.edge_scene import Shown, verdict
from twinstep.parity.proof.peers.edge_training import STEPS, Trained
from twinstep.parity.proof.peers.findings import idle, unexplained
from twinstep.parity.proof.peers.installed import is_installed, quiet, start_compiling
from twinstep.parity.proof.peers.live import CONFIGURATIONS, Agreement, compared
from twinstep.parity.proof.peers.observe import Observation, observed
from twinstep.parity.proof.peers.page import FILE, page
from twinstep.parity.proof.peers.peer import Peer
from twinstep.parity.proof.peers.record import record, record_edges, record_zero
from twinstep.parity.proof.peers.shelves import peers
from twinstep.parity.proof.peers.zero_ledger import LEDGER
from twinstep.parity.proof.peers.zero_volume import volume_faults
from twinstep.parity.records.errors import EXIT_BROKEN, EXIT_KEPT, EXIT_TOO_LITTLE, UsageError


def judge_peers(package: str | None, write: bool) -> int:
    """Judge, print, and compare with the findings; the exit code."""
    screen = _screen()
    chosen = peers(package)
    beside = package != "torch" and is_installed("deepspeed")
    if write and (package or not beside):
        raise UsageError("--record needs deepspeed and every package: run make peers first")
    if beside:
        start_compiling()
    agreement = _live(screen) if beside else None
    seen = observed(chosen, told=lambda peer: screen.print(f"judging {peer.name}: {peer.says}"))
    screen.print(_table(chosen, seen))
    for peer in chosen:
        if peer.missing():
            screen.print(f"not judged: {peer.name}: {peer.missing()}")
    wrong = [*unexplained(seen), *idle(seen), *(agreement.wrong if agreement else [])]
    if beside:
        wrong += _zero(screen, write)
        wrong += _edges(screen, write)
    if write and agreement is not None:
        record(chosen, seen, agreement)
        FILE.write_text(page())
    for sentence in wrong:
        screen.print(sentence, style="red")
    broken = sum(len(one.broken) for one in seen)
    kept = sum(len(one.kept) for one in seen)
    screen.print(
        f"{kept} laws kept, {broken} broken and explained in docs/reference/peers.md", style="bold"
    )
    if not seen:
        return EXIT_TOO_LITTLE
    return EXIT_BROKEN if wrong else EXIT_KEPT


def show_edges(write: bool) -> int:
    """Run the ten edges beside DeepSpeed, print them, and compare with the record."""
    screen = _screen()
    if not is_installed("deepspeed"):
        screen.print("nothing to run beside: deepspeed is not installed; run make peers")
        return EXIT_TOO_LITTLE
    start_compiling()
    wrong = _edges(screen, write)
    if write:
        FILE.write_text(page())
    for sentence in wrong:
        screen.print(sentence, style="red")
    return EXIT_BROKEN if wrong else EXIT_KEPT


def show_zero(write: bool) -> int:
    """Run ZeRO beside DeepSpeed's, print what differs, and compare with the ledger."""
    screen = _screen()
    if not is_installed("deepspeed"):
        screen.print("nothing to run beside: deepspeed is not installed; run make peers")
        return EXIT_TOO_LITTLE
    wrong = _zero(screen, write)
    if write:
        FILE.write_text(page())
    for sentence in wrong:
        screen.print(sentence, style="red")
    return EXIT_BROKEN if wrong else EXIT_KEPT


def _zero(screen: Console, write: bool) -> list[str]:
    """DeepSpeed's ZeRO and both of our sides over the same random runs; what disagrees."""
    count = zero_live.CONFIGURATIONS
    screen.print(f"running DeepSpeed's ZeRO beside ours: {count} configurations, on 1 and 2 ranks")
    seen = zero_live.agreed()
    if write:
        record_zero(seen)
    table = Table("gradients are", "may show in", "seen in")
    for row in LEDGER:
        table.add_row(row.name, str(seen.applies[row.name]), str(seen.shows[row.name]))
    screen.print(table)
    screen.print(
        f"{seen.steps} steps, {seen.skipped} skipped: weights equal in {seen.exact} "
        f"configurations, within the bound of their norm in {seen.within}"
    )
    return [*seen.wrong, *volume_faults(seen.volumes)]


def _screen() -> Console:
    # Small tensors and a compiler beside us: threads would only wait for one another.
    torch.set_num_threads(1)
    return Console(highlight=False, width=None if sys.stdout.isatty() else 150, file=sys.stdout)


def _edges(screen: Console, write: bool) -> list[str]:
    """Run and print the ten edges; what they contradict."""
    seen, runs = run_all(lambda edge: screen.print(f"running edge {edge} beside DeepSpeed"))
    for row in _edge_tables(seen, runs):
        screen.print(row)
    wrong = contradictions(seen, runs)
    if write:
        record_edges(seen, runs)
    return wrong


def _edge_tables(seen: list[Shown], runs: list[Trained]) -> tuple[Table, Table]:
    table = Table("edge", "shows", "right", "DeepSpeed", "", "ours", "Compat.deepspeed()")
    for scene, one in zip(scenes(), seen, strict=True):
        sides = (one.upstream, verdict(scene, one), one.default, one.compat)
        table.add_row(scene.edge, scene.shows, str(list(scene.right)), *map(str, sides))
    losses = Table("edge", f"loss over {STEPS} steps: DeepSpeed", "ours", "Compat.deepspeed()")
    for run in runs:
        three = (run.upstream, run.default, run.compat)
        losses.add_row(run.edge, *(f"{early:.3f} -> {last:.3f}" for early, last in three))
    return table, losses


def _live(screen: Console) -> Agreement:
    """DeepSpeed's optimizers and the reference's over the same random runs."""
    screen.print(f"running DeepSpeed's optimizers beside ours: {CONFIGURATIONS} configurations")
    with quiet():
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
