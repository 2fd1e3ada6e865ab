"""`parity prove --sizes`: whether flat kernels touch what they should for every size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from rich.console import Console

from twinstep.parity.prove.affine import NotAffine
from twinstep.parity.prove.command import write
from twinstep.parity.prove.configurations_command import chosen_from
from twinstep.parity.prove.rows import prove_situation
from twinstep.parity.prove.situations import Situation, situations
from twinstep.parity.prove.sizes import SMALL, Wrong, prove_sizes
from twinstep.parity.records.errors import EXIT_BROKEN, EXIT_KEPT, EXIT_TOO_LITTLE
from twinstep.parity.records.proof import NOT_PROVED, PROVED, REFUTED, UNSUPPORTED
from twinstep.parity.registry.kernels import Kernel
from twinstep.parity.registry.selection import Selection
from twinstep.parity.report.progress import Progress

RUN = 1 << 16
"""Most elements with which a fault is confirmed by a run."""


def sizes_in(
    file: str | None, chosen: Selection, seconds: float, json: str | None, line: Progress
) -> int:
    """Prove the addresses of a file's kernels, or of ours, for every size; the exit code."""
    console = Console(stderr=json == "-", highlight=False, soft_wrap=True)
    line.phase(f"loading {file or 'our kernels'}")
    found = every_size(console, chosen_from(file, chosen), chosen.dtypes or (), seconds, line)
    line.stop()
    if json is not None:
        write(found, json)
    if any(row["word"] == REFUTED for row in found):
        return EXIT_BROKEN
    return EXIT_KEPT if found else EXIT_TOO_LITTLE


def every_size(
    console: Console,
    given: Sequence[Kernel],
    dtypes: Sequence[str],
    seconds: float,
    line: Progress | None = None,
) -> list[dict[str, str]]:
    """Print a line for each flat kernel and dtype; the same as data."""
    found: list[dict[str, str]] = []
    for kernel in given:
        seen: set[str] = set()
        for situation in situations(kernel, dtypes):
            if situation.layout != "flat" or situation.dtype in seen:
                continue
            seen.add(situation.dtype)
            if line is not None:
                line.phase(f"proving {kernel.name} {situation.dtype} for every size")
            word, detail = size_verdict(replace(situation, sizes=(SMALL,), aligned=True), seconds)
            names = {"kernel": kernel.name, "dtype": situation.dtype}
            found.append({**names, "word": word, "detail": detail})
            with nullcontext() if line is None else line.aside():
                console.print(f"{kernel.name:28} {situation.dtype:14} {word}", markup=False)
                for row in detail.splitlines():
                    console.print(f"    {row}", markup=False)
    counts = Counter(row["word"] for row in found)
    words = ", ".join(f"{count} {word}" for word, count in counts.items())
    console.print(words or "no flat kernel was chosen", markup=False)
    return found


def size_verdict(situation: Situation, seconds: float) -> tuple[str, str]:
    """The word for a flat kernel of any size, and what it rests on or fails at."""
    try:
        found = prove_sizes(situation)
    except NotAffine as error:
        return UNSUPPORTED, str(error)
    except Wrong as error:
        if error.size > RUN:
            return NOT_PROVED, f"with {error.size} elements: {error}"
        run = prove_situation(replace(situation, sizes=(error.size,)), seconds)
        word = NOT_PROVED if run.word == PROVED else REFUTED
        return word, f"with {error.size} elements: {error}\n{run.word}: {run.detail}"
    lines = [
        f"every size from 1 to {found.most:,}: each written element once, nothing else, nothing "
        "outside is read",
        f"{found.variants} compiled variants, programs of {', '.join(map(str, found.chunks))} "
        f"elements; grid and arguments seen at {found.probes} sizes",
        *(f"nothing is written on one side of {where}" for where in found.skipped),
    ]
    return PROVED, "\n".join(lines)
