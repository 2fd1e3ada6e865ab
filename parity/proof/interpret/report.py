"""The user's view of the divergences: a warning beside verdicts, docs/reference/engines.md."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from twinstep.parity.proof.interpret.constructs import CONSTRUCTS
from twinstep.parity.proof.interpret.facts import facts_of
from twinstep.parity.proof.interpret.measure import Measured, everywhere
from twinstep.parity.records.errors import EXIT_BROKEN, EXIT_KEPT
from twinstep.parity.registry.kernels import Kernel
from twinstep.parity.report.exports import environment, write

UNMEASURED = "not yet measured"
Found = dict[str, dict[str, Measured]]


def touching(kernel: Kernel) -> list[str]:
    """Names of the known divergences that a kernel meets."""
    facts = facts_of(kernel)
    return [each.name for each in CONSTRUCTS if each.known and each.touched(facts)]


def print_warnings(screen: Console, kernels: Sequence[Kernel]) -> None:
    """Say of every kernel judged on the interpreter what its verdict is not good for."""
    for kernel in kernels:
        names = "; ".join(touching(kernel))
        screen.print(
            f"interpret: {kernel.name} meets what Triton's interpreter is known to do otherwise "
            f"than compiled code: {names}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    screen.print(
        "interpret: a kept law says nothing about these, and a broken one may be the interpreter's "
        "own fault; judge on replay or cuda (docs/reference/engines.md)",
        highlight=False,
        soft_wrap=True,
    )


def print_divergences(screen: Console, json_file: str | None) -> int:
    """Measure every construct on every engine here and print the table; the exit code."""
    found = everywhere(torch.cuda.is_available())
    printed = Table(title="constructs on each engine", title_justify="left")
    for name in (
        "construct",
        "interpreter",
        "replay",
        "cuda",
        "first divergence of the interpreter",
    ):
        printed.add_column(name)
    for construct in CONSTRUCTS:
        cells = [str(column[construct.name]) for column in columns(found)]
        cells += [UNMEASURED] * (3 - len(cells))
        printed.add_row(construct.name, *cells, found["interpret"][construct.name].first)
    screen.print(printed)
    unexpected = surprises(found)
    for sentence in unexpected:
        screen.print(sentence, style="bold red", highlight=False, markup=False, soft_wrap=True)
    if json_file is not None:
        write(json_file, as_json(found), "--json")
    return EXIT_BROKEN if unexpected else EXIT_KEPT


def columns(found: Found) -> list[dict[str, Measured]]:
    """What was measured, in the order of the table."""
    return [found[engine] for engine in ("interpret", "replay", "cuda") if engine in found]


def surprises(found: Found) -> list[str]:
    """Where replay leaves a statement, or the interpreter is not as the list of known ones says."""
    sentences = []
    for construct in CONSTRUCTS:
        replayed = found["replay"][construct.name]
        if replayed.differ > 0:
            sentences.append(f"{construct.name}: replay differs {replayed.first}")
        interpreted = found["interpret"][construct.name]
        leaves = interpreted.differ != 0
        if leaves != construct.known:
            verb = "leaves" if leaves else "keeps"
            sentences.append(f"{construct.name}: the interpreter {verb} what is stated")
    return sentences


def as_json(found: Found) -> str:
    """Every construct on every engine."""
    engines = {
        engine: {name: vars(measured) for name, measured in column.items()}
        for engine, column in found.items()
    }
    return json.dumps({"schema": 1, "environment": environment(), "engines": engines}, indent=1)


def markdown(found: Found) -> str:
    """The table as it stands in docs/reference/engines.md."""
    lines = ["| construct | interpreter | replay | GPU | what it is about |", "| --- " * 5 + "|"]
    for construct in CONSTRUCTS:
        cells = [str(found[engine][construct.name]) for engine in ("interpret", "replay")]
        gpu = str(found["cuda"][construct.name]) if "cuda" in found else UNMEASURED
        lines.append(f"| {construct.name} | {' | '.join(cells)} | {gpu} | {construct.note} |")
    return "\n".join(lines)
