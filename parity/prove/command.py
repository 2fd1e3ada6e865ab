"""`parity prove`: the proofs of our kernels, or of a file's, as a table."""

from __future__ import annotations

import json as json_module
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from twinstep.parity.prove.rows import Limits, cores, proved_rows, rows_of
from twinstep.parity.records.errors import EXIT_BROKEN, EXIT_KEPT, EXIT_TOO_LITTLE
from twinstep.parity.records.proof import (
    ENDED,
    PROVED,
    REFUTED,
    WORST,
    Proof,
    conditions,
    counted,
    held_for,
)
from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import Kernel, kernels
from twinstep.parity.registry.selection import Selection
from twinstep.parity.report.progress import Progress
from twinstep.parity.runner.load_file import load_file


def prove(
    file: str | None,
    chosen: Selection,
    json: str | None,
    seconds: float,
    verbose: bool,
    jobs: int | None,
    line: Progress,
) -> int:
    """Prove kernels and print the table; the exit code."""
    started = time.perf_counter()
    console = Console(stderr=json == "-", highlight=False, soft_wrap=True)
    found: list[Proof] = []
    line.phase(f"loading {file or 'our kernels'}")
    if file is not None:
        known: Sequence[Kernel] = [k for k in load_file(file).kernels if isinstance(k, Kernel)]
    else:
        register_house()
        known = kernels()
    left = rows_of(known, chosen)
    count, total = min(jobs or cores(), len(left)), len(left)

    def doing() -> str:
        done = f"{total - len(left)} of {total} rows, {time.perf_counter() - started:.0f} s so far"
        return f"proving {' '.join(left[0])}: {done}" if left else ""

    line.follow(doing)
    for own in proved_rows(file, known, chosen, Limits(situation=seconds), count):
        found += own
        left.remove((own[0].kernel, own[0].dtype))
        with line.aside():
            print_row(console, own, verbose)
    line.stop()
    elements = sum(proof.verdict.elements for proof in found)
    console.print(
        f"{counted(found) or 'nothing to prove'} ({elements:,} elements compared, "
        f"{time.perf_counter() - started:.0f} s)"
    )
    if json is not None:
        write([proof.record() for proof in found], json)
    words = {proof.verdict.word for proof in found}
    if REFUTED in words:
        return EXIT_BROKEN
    return EXIT_KEPT if PROVED in words and ENDED not in words else EXIT_TOO_LITTLE


def write(records: Sequence[Mapping[str, object]], file: str) -> None:
    """Write records as JSON to a file; `-` is standard output."""
    text = json_module.dumps(records, indent=1)
    print(text) if file == "-" else Path(file).write_text(text + "\n")


def print_row(console: Console, row: Sequence[Proof], verbose: bool) -> None:
    """One line for a kernel on one dtype, with the details of what is not proved."""
    seconds = sum(proof.verdict.seconds for proof in row)
    head = f"{row[0].kernel:28} {row[0].dtype:14} {counted(row, WORST):34}"
    console.print(f"{head} {seconds:5.1f} s", markup=False)
    for line in [] if verbose else held_for(row):
        console.print(f"    {line}", markup=False)
    shown: set[str] = set()
    for proof in row:
        verdict, words = proof.verdict, proof.words or "scalars"
        if verdict.detail and (verbose or verdict.detail not in shown):
            shown.add(verdict.detail)
            console.print(f"    {words}: {verdict.word}", markup=False)
            for line in verdict.detail.splitlines():
                console.print(f"        {line}", markup=False)
        elif verbose:
            assumed = "; ".join(conditions([verdict]))
            console.print(
                f"    {words}: {verdict.word}, {verdict.paths} paths"
                + (f", assuming {assumed}" if assumed else ""),
                markup=False,
            )
