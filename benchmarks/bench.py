"""`parity bench`: run benchmarks side by side, compare two runs, gate a change, keep a history."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from twinstep.parity.records.errors import (
    EXIT_BROKEN,
    EXIT_KEPT,
    EXIT_TOO_LITTLE,
    EXIT_USAGE,
    UsageError,
)
from twinstep.parity.report.progress import during

if TYPE_CHECKING:
    from twinstep.benchmarks.runs.results import Document
    from twinstep.parity.registry.kernels import Kernel

WIDTH = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code.

    Raises:
        UsageError: input that cannot be read, or nothing to compare with.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["gpu-check"]:
        from twinstep.benchmarks.gpu_check import main as gpu_check

        return gpu_check(words[1:])
    try:
        options = parser().parse_args(words)
    except SystemExit as left:  # argparse has printed the reason, or the help
        return left.code if isinstance(left.code, int) else EXIT_USAGE
    done: int = options.command(options)
    return done


def parser() -> argparse.ArgumentParser:
    """The words that each command takes."""
    top = argparse.ArgumentParser(prog="parity bench", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="time kernels beside peers and plain passes")
    run.add_argument("file", nargs="?", default="", help="registers kernels; default: ours")
    run.add_argument("--op", action="append", default=[], metavar="NAME", help="operation")
    run.add_argument("--processes", type=int, default=5, help="fresh ones; default 5")
    run.add_argument("--rounds", type=int, default=15, help="in each process; default 15")
    run.add_argument(
        "--budget",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="of all of it; what it cuts is named",
    )
    run.add_argument("--curves", action="store_true", help="also sizes and numbers of tensors")
    run.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    run.add_argument("--picture", type=Path, metavar="FILE", help="draw them: .png, .svg, .pdf")
    run.add_argument("--export", type=Path, metavar="FILE", help="for github-action-benchmark")
    run.add_argument("--record", type=Path, metavar="FOLDER", help="enter them into a history")
    run.set_defaults(command=run_command)

    compare = commands.add_parser("compare", help="two results files of `run --json`")
    compare.add_argument("old", type=Path)
    compare.add_argument("new", type=Path)
    compare.set_defaults(command=compare_command)

    gate = commands.add_parser("gate", help="fail if a cost grew since a baseline")
    gate.add_argument("file", nargs="?", default="", help="registers kernels; default: ours")
    gate.add_argument(
        "--baseline", default="HEAD", help="revision, checkout, or older FILE; default HEAD"
    )
    gate.add_argument("--op", action="append", default=[], metavar="NAME", help="operation")
    gate.add_argument(
        "--accept",
        action="append",
        default=[],
        metavar="'LABEL: COUNT'",
        help="a growth that is meant; * and ? as in file names",
    )
    which = gate.add_mutually_exclusive_group()
    which.add_argument("--counts", action="store_true", help="no times")
    which.add_argument("--times", action="store_true", help="no counts")
    gate.add_argument(
        "--dedicated",
        action="store_true",
        help="the GPU is for us alone: minimum effect 2 %% instead of 5 %%",
    )
    gate.add_argument("--sets", type=int, default=4, help="sets of fresh processes; default 4")
    gate.add_argument("--rounds", type=int, default=12, help="in each set; default 12")
    gate.add_argument("--json", type=Path, metavar="FILE", help="write everything found")
    gate.add_argument(
        "--annotate",
        action="store_true",
        default=os.environ.get("GITHUB_ACTIONS") == "true",
        help="workflow commands of GitHub; on by itself in a workflow",
    )
    gate.set_defaults(command=gate_command)

    trend = commands.add_parser("trend", help="picture of a history, a file for each series")
    trend.add_argument("history", type=Path)
    trend.add_argument("picture", type=Path)
    trend.set_defaults(command=trend_command)

    commands.add_parser("gpu-check", help="what only a GPU can show; as make gpu-check")
    return top


def run_command(options: argparse.Namespace) -> int:
    """Time everything, print the table, write what is asked for."""
    from twinstep.benchmarks.runs.budget import Plan
    from twinstep.benchmarks.runs.history import exported, record
    from twinstep.benchmarks.runs.picture import draw_run
    from twinstep.benchmarks.runs.results import chosen_groups, controls, run
    from twinstep.benchmarks.runs.tables import bracketed, quietness, run_table, versions

    kernels, classes = registered(options.file), not options.file
    table, once, left_out = chosen_groups(kernels, options.op, options.curves, classes)
    screen = Console(width=None if os.isatty(1) else WIDTH)
    if not table:
        print("parity: nothing can be timed here: kernels need a GPU, or are not selected")
        return EXIT_TOO_LITTLE
    plan = Plan(options.processes, options.rounds, options.budget)
    with during("") as line:
        document = run(table, once, options.file, plan, line.phase)
    screen.print(run_table(document))
    worst = controls(document["groups"])[0]
    screen.print(
        f"A/A: ours beside itself is furthest from 1 in {worst[0]}: {bracketed(worst[1])}\n"
        f"{versions(document)}; {quietness(document)}",
        highlight=False,
    )
    for sentence in (*left_out, *document["cut"], *document["problems"], *document["errors"]):
        screen.print(sentence, highlight=False, markup=False)
    for path, found in ((options.json, document), (options.export, exported(document))):
        if path is not None:
            written(path, found)
    if options.picture is not None:
        draw_run(document, options.picture)
    if options.record is not None:
        file, new = record(document, options.record)
        print(f"{'a new series in' if new else 'entered into'} {file}")
    return EXIT_BROKEN if document["errors"] or document["problems"] else EXIT_KEPT


def compare_command(options: argparse.Namespace) -> int:
    """Set two runs beside each other; of different machines or versions, say so and stop."""
    from twinstep.benchmarks.runs.key import differences
    from twinstep.benchmarks.runs.tables import compared

    old, new = read(options.old), read(options.new)
    other = differences(old["key"], new["key"])
    if other:
        print(f"parity: times of these runs cannot be compared: {'; '.join(other)}")
        return EXIT_TOO_LITTLE
    Console(width=None if os.isatty(1) else WIDTH).print(compared(old, new))
    return EXIT_KEPT


def gate_command(options: argparse.Namespace) -> int:
    """Compare with a baseline; 1 if a cost grew."""
    from twinstep.benchmarks.regressions.gate import Verdict, judge_counts, judge_times
    from twinstep.benchmarks.regressions.pairs import DEDICATED, SHARED, Plan
    from twinstep.benchmarks.regressions.report import as_document, print_verdict
    from twinstep.benchmarks.regressions.sides import SideFailed, checkouts

    plan = Plan(options.sets, options.rounds, DEDICATED if options.dedicated else SHARED)
    verdict = Verdict()
    try:
        with checkouts(options.baseline, options.file) as sides, during("") as line:
            if not options.times:
                line.phase("counting")
                judge_counts(verdict, *sides, options.op, options.accept)
            if not options.counts:
                judge_times(verdict, *sides, plan, options.op, line.phase)
    except SideFailed as failure:
        raise UsageError(f"{failure} [parity bench gate]") from None
    print_verdict(Console(width=None if os.isatty(1) else WIDTH), verdict, plan, options.annotate)
    if options.json is not None:
        written(options.json, as_document(verdict, plan))
    if not verdict.compared:
        return EXIT_TOO_LITTLE
    return EXIT_BROKEN if verdict.failures else EXIT_KEPT


def trend_command(options: argparse.Namespace) -> int:
    """Draw every series of a history that has two runs; one alone is no trend."""
    from twinstep.benchmarks.runs.history import load
    from twinstep.benchmarks.runs.picture import draw_trend

    path, drawn = options.picture, 0
    for series in load(options.history):
        name = f"{len(series['runs'])} of {series['key']}"
        if len(series["runs"]) < 2:
            print(f"not drawn, since a trend needs two runs: {name}")
            continue
        drawn += 1
        file = path.with_stem(f"{path.stem}-{drawn}") if drawn > 1 else path
        draw_trend(series, file)
        print(f"{file}: {name}")
    return EXIT_KEPT if drawn else EXIT_TOO_LITTLE


def registered(file: str) -> list[Kernel]:
    """Kernels of a file, or ours."""
    from twinstep.parity.registry.house_kernels import register_house
    from twinstep.parity.registry.kernels import kernels
    from twinstep.parity.runner.load_file import load_file

    if file:
        return load_file(file).kernels
    register_house()
    return list(kernels())


def read(path: Path) -> Document:
    """A results file.

    Raises:
        UsageError: it is none.
    """
    try:
        found: Document = json.loads(path.read_text())
        return {"key": found["key"], "groups": found["groups"], **found}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no results file: {type(error).__name__} {error}") from None


def written(path: Path, document: object) -> None:
    """Write a document as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
