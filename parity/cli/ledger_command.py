"""The command `parity ledger`: compare two ledgers, or write the declared cells anew."""

from __future__ import annotations

import sys

from rich.console import Console

from twinstep.parity.records.errors import EXIT_BROKEN, EXIT_KEPT, UsageError
from twinstep.parity.records.ledger_diff import difference, read
from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import kernels
from twinstep.parity.report.declared_cells import FILE, declared_floor, floor_of, sunk, write_floor
from twinstep.parity.sequences.house_optimizers import register_our_optimizers
from twinstep.parity.sequences.registry import twins


def diff(old: str, new: str) -> int:
    """`parity ledger diff OLD NEW`; the exit code: 1 if something became looser."""
    found = difference(read(old), read(new))
    screen = _screen()
    for line in found.looser:
        screen.print(f"looser: {line}")
    for line in found.tighter:
        screen.print(f"tighter: {line}")
    screen.print(f"{len(found.looser)} looser, {len(found.tighter)} tighter or new", style="bold")
    return EXIT_BROKEN if found.looser else EXIT_KEPT


def declare() -> int:
    """`parity ledger declare`; reports what is given up, and writes the file."""
    register_house()
    register_our_optimizers()
    now = floor_of(kernels(), twins())
    screen = _screen()
    try:
        given_up = sunk(declared_floor(), now)
    except UsageError:
        given_up = []
    for line in given_up:
        screen.print(f"given up: {line}")
    write_floor(now)
    counts = f"{len(now)} kernels and optimizers, {len(given_up)} given up"
    screen.print(f"parity/report/{FILE}: {counts}")
    return EXIT_KEPT


def _screen() -> Console:
    width = None if sys.stdout.isatty() else 10_000
    return Console(highlight=False, markup=False, soft_wrap=True, width=width)
