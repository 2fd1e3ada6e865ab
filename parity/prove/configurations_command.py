"""`parity prove --configurations FILE`: the sets of bits that a file's configurations give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

from rich.console import Console

from twinstep.parity.prove.configurations import (
    Configuration,
    Sets,
    compare,
    configurations_of,
)
from twinstep.parity.prove.situations import Situation, situations
from twinstep.parity.records.errors import EXIT_BROKEN, EXIT_KEPT, EXIT_TOO_LITTLE
from twinstep.parity.records.proof import REFUTED
from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import Kernel, kernels
from twinstep.parity.registry.selection import Selection
from twinstep.parity.report.progress import Progress
from twinstep.parity.runner.load_file import load_file
from twinstep.replay.errors import CannotReplay


def chosen_from(file: str | None, chosen: Selection) -> list[Kernel]:
    """The chosen kernels of a file, or of ours."""
    register_house()
    if file is not None:
        known: Sequence[Kernel] = [k for k in load_file(file).kernels if isinstance(k, Kernel)]
    else:
        known = kernels()
    return list(chosen.kernels(known))


def configurations_in(file: str | None, chosen: Selection, seconds: float, line: Progress) -> int:
    """Compare the configurations of a file's kernels, or of ours; the exit code."""
    console = Console(highlight=False, soft_wrap=True)
    line.phase(f"loading {file or 'our kernels'}")
    given, dtypes = chosen_from(file, chosen), chosen.dtypes or ()
    return compare_configurations(console, given, dtypes, seconds, line)


def compare_configurations(
    console: Console,
    given: Sequence[Kernel],
    dtypes: Sequence[str],
    seconds: float,
    line: Progress | None = None,
) -> int:
    """Compare the configurations of kernels, operation by operation; the exit code.

    It is 1 where values were found for which two configurations differ.
    """
    by_operation: dict[str, list[Kernel]] = {}
    for kernel in given:
        by_operation.setdefault(kernel.operation.name, []).append(kernel)
    code, compared = EXIT_KEPT, False
    for name, own in by_operation.items():
        if line is not None:
            line.phase(f"comparing configurations for {name}")
        for situation, sets in _compared(own, dtypes, seconds):
            words = situation.words or "scalars"
            with nullcontext() if line is None else line.aside():
                console.print(f"{name} {situation.dtype}, {words}: {sets.words}", markup=False)
                if len(sets.members) > 1:
                    _show(console, sets)
            compared = compared or not sets.missing
            if any(verdict.word == REFUTED for verdict in sets.apart):
                code = EXIT_BROKEN
    return code if compared else EXIT_TOO_LITTLE


def _compared(
    given: Sequence[Kernel], dtypes: Sequence[str], seconds: float
) -> Iterator[tuple[Situation, Sets]]:
    """Every situation of the kernels of one operation, with its sets."""
    seen: set[tuple[str, str]] = set()
    for kernel in given:
        for situation in situations(kernel, dtypes):
            key = (situation.dtype, situation.words)
            if key in seen:
                continue
            seen.add(key)
            try:
                found: list[Configuration] = []
                for own in given:
                    claims = situation.dtype in own.dtypes
                    if claims and (not situation.layout or situation.layout in own.layouts):
                        found += configurations_of(own, situation)
            except CannotReplay as error:
                yield situation, Sets(missing=str(error))
                continue
            yield situation, compare(situation, found, seconds)


def _show(console: Console, sets: Sets) -> None:
    """The members of each set, and what keeps it apart."""
    for at, names in enumerate(sets.members):
        console.print(f"    set {at + 1}: {', '.join(names)}", markup=False)
        if at:
            verdict = sets.apart[at - 1]
            shown = verdict.detail.replace("kernel: ", f"set {at + 1}: ")
            shown = shown.replace("reference: ", "an earlier set: ")
            shown = shown.replace("but should be", "but in an earlier set it is")
            console.print(f"        {verdict.word}", markup=False)
            for line in shown.splitlines():
                console.print(f"        {line}", markup=False)
