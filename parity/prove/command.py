"""`parity prove`: the proofs of our kernels, or of a file's, as a table."""

from __future__ import annotations

import json as json_module
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from twinstep.parity.prove.prove import (
    NOT_PROVED,
    OUT_OF_TIME,
    PROVED,
    REFUTED,
    UNSUPPORTED,
    WORDS,
    Prover,
    Verdict,
)
from twinstep.parity.prove.situations import Situation, situations
from twinstep.parity.prove.trace import Tracer
from twinstep.parity.records.errors import EXIT_BROKEN, EXIT_KEPT, EXIT_TOO_LITTLE
from twinstep.parity.registry.engines import engine_for, running
from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import Kernel, kernels
from twinstep.parity.registry.selection import Selection
from twinstep.parity.runner.load_file import load_file

WORST = (REFUTED, NOT_PROVED, UNSUPPORTED, OUT_OF_TIME, PROVED)


@dataclass(frozen=True)
class Row:
    """One situation and its verdict."""

    situation: Situation
    verdict: Verdict


def prove_situation(situation: Situation, seconds: float) -> Verdict:
    """The verdict on one situation."""
    kernel = situation.kernel
    engine = engine_for(kernel)
    if engine.name not in ("replay", "cpu") or engine.missing:
        return Verdict(UNSUPPORTED, engine.missing or f"the engine {engine.name}")
    with running(engine) if engine.name == "replay" else nullcontext():
        tracer = Tracer(kernel.function, engine)
        return Prover(tracer, situation.case(), seconds, kernel.arithmetic).prove()


def prove(
    file: str | None, chosen: Selection, json: str | None, seconds: float, verbose: bool
) -> int:
    """Prove kernels and print the table; the exit code."""
    started = time.perf_counter()
    register_house()
    if file is not None:
        known: Sequence[Kernel] = [k for k in load_file(file).kernels if isinstance(k, Kernel)]
    else:
        known = kernels()
    console = Console(stderr=json == "-", highlight=False, soft_wrap=True)
    rows: list[Row] = []
    for kernel in chosen.kernels(known):
        own = [
            Row(situation, prove_situation(situation, seconds))
            for situation in situations(kernel, chosen.dtypes)
        ]
        rows += own
        _print_kernel(console, kernel, own, verbose)
    counts = Counter(row.verdict.word for row in rows)
    total = ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word])
    elements = sum(row.verdict.elements for row in rows)
    console.print(
        f"{total or 'nothing to prove'} ({elements:,} elements compared, "
        f"{time.perf_counter() - started:.0f} s)"
    )
    if json is not None:
        text = json_module.dumps([_as_json(row) for row in rows], indent=1)
        print(text) if json == "-" else Path(json).write_text(text + "\n")
    if counts[REFUTED]:
        return EXIT_BROKEN
    return EXIT_KEPT if rows else EXIT_TOO_LITTLE


def _print_kernel(console: Console, kernel: Kernel, rows: Iterable[Row], verbose: bool) -> None:
    """One line for each dtype, with the details of what is not proved."""
    by_dtype: dict[str, list[Row]] = {}
    for row in rows:
        by_dtype.setdefault(row.situation.dtype, []).append(row)
    for dtype, own in by_dtype.items():
        counts = Counter(row.verdict.word for row in own)
        words = ", ".join(f"{counts[word]} {word}" for word in WORST if counts[word])
        seconds = sum(row.verdict.seconds for row in own)
        console.print(f"{kernel.name:28} {dtype:14} {words:34} {seconds:5.1f} s", markup=False)
        for line in [] if verbose else proved_for(own):
            console.print(f"    {line}", markup=False)
        shown: set[str] = set()
        for row in own:
            detail = row.verdict.detail
            if detail and (verbose or detail not in shown):
                shown.add(detail)
                words = row.situation.words or "scalars"
                console.print(f"    {words}: {row.verdict.word}", markup=False)
                for line in detail.splitlines():
                    console.print(f"        {line}", markup=False)
            elif verbose:
                assumed = "; ".join(row.verdict.assumes)
                console.print(
                    f"    {row.situation.words or 'scalars'}: {row.verdict.word}, "
                    f"{row.verdict.paths} paths" + (f", assuming {assumed}" if assumed else ""),
                    markup=False,
                )


def proved_for(rows: Sequence[Row]) -> list[str]:
    """Sizes, layouts and assumptions of what is proved, one line for each set of assumptions."""
    by_place: dict[str, list[Row]] = {}
    for row in rows:
        by_place.setdefault(row.situation.place, []).append(row)
    found: dict[tuple[str, ...], dict[str, None]] = {}
    for place, own in by_place.items():
        whole = all(row.verdict.word == PROVED for row in own)
        for row in own:
            if row.verdict.word == PROVED:
                words = place if whole else row.situation.words
                found.setdefault(row.verdict.assumes, {})[words or "scalars"] = None
    return [
        f"proved for {', '.join(words)}" + (f"; {'; '.join(assumes)}" if assumes else "")
        for assumes, words in found.items()
    ]


def _as_json(row: Row) -> dict[str, object]:
    situation = row.situation
    return {
        "kernel": situation.kernel.name,
        "operation": situation.kernel.operation.name,
        "dtype": situation.dtype,
        "layout": situation.layout,
        "sizes": list(situation.sizes),
        "aligned": situation.aligned,
        "options": dict(situation.options),
        **asdict(row.verdict),
    }
