"""The scenario commands: `lockstep`, `train`, `precision`, `compare` and `picture`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from twinstep.parity.records.errors import UsageError
from twinstep.scenarios import (
    comparison_picture,
    lockstep,
    picture,
    precision,
    precision_report,
    train,
)
from twinstep.scenarios import trace as traces
from twinstep.scenarios.checkpoint import CheckpointUnfit
from twinstep.scenarios.options import parser, plan_of
from twinstep.scenarios.plan import DTYPES, Plan
from twinstep.scenarios.precision import TracesUnfit
from twinstep.scenarios.progress import Lines, Reporter, reporter
from twinstep.scenarios.sides import engine
from twinstep.scenarios.text import TextMissing
from twinstep.scenarios.trace import Trace, TraceUnreadable

EQUAL, DIFFERS, USAGE, TOO_LITTLE = 0, 1, 2, 3
SHOWN = 10  # differences printed before the rest is only counted
EVERY = 50  # steps between two lines of `precision` to a pipe
REFUSED = (
    TextMissing,
    TraceUnreadable,
    TracesUnfit,
    CheckpointUnfit,
    picture.PictureImpossible,
    OSError,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; see `scenarios.main`."""
    try:
        chosen = parser().parse_args(argv)
    except SystemExit as left:  # argparse has said why, or printed the help
        return left.code if isinstance(left.code, int) else USAGE
    try:
        return COMMANDS[chosen.command](chosen)
    except UsageError as problem:
        print(f"scenarios {chosen.command}: {problem}", file=sys.stderr)
        return problem.exit_code
    except REFUSED as problem:
        print(f"scenarios {chosen.command}: {problem}", file=sys.stderr)
        return USAGE


def console() -> Console:
    """Standard output; wide where nobody looks at its width."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 150)


def planned(chosen: argparse.Namespace, dtype: str, seed: int | None = None) -> Plan:
    """The run that the options ask for.

    Raises:
        UsageError: the options do not go together.
    """
    try:
        return plan_of(chosen, dtype, seed)
    except ValueError as problem:
        raise UsageError(str(problem)) from problem


def lockstep_command(chosen: argparse.Namespace) -> int:
    """Run both sides for each dtype asked for; the first that differs ends the command."""
    for dtype in DTYPES if chosen.dtype == "all" else [chosen.dtype]:
        if lockstep_dtype(chosen, dtype) == DIFFERS:
            return DIFFERS
    return EQUAL


def lockstep_dtype(chosen: argparse.Namespace, dtype: str) -> int:
    """Run both sides for one dtype and print the verdict."""
    start, lines, plan = time.perf_counter(), Lines(), planned(chosen, dtype)
    label = f"language_model, {dtype}: reference and fast on every step, engine {engine().name}"
    lines.begin(label, plan.steps)
    report = lockstep.run(
        plan,
        layouts=lockstep.LAYOUTS if chosen.layout == "both" else (chosen.layout,),
        progress=lines.step,
    )
    print(summary(report.trace, time.perf_counter() - start))
    draw([report.trace], chosen.picture)
    print(f"compared {report.compared:,} values of {', '.join(report.operations)}")
    for difference in report.differences[:SHOWN]:
        print(f"DIFFERS {difference}")
    if len(report.differences) > SHOWN:
        print(f"... and {len(report.differences) - SHOWN} more tensors")
    print("differs" if report.differences else "equal: every bit, on every step", flush=True)
    return DIFFERS if report.differences else EQUAL


def train_command(chosen: argparse.Namespace) -> int:
    """Train with one side, print the steps, write what was asked for."""
    if chosen.seeds > 1 and (chosen.stop or chosen.save or chosen.resume):
        raise UsageError("--stop, --save and --resume go with one seed [--seeds]")
    seeds = range(chosen.seed, chosen.seed + chosen.seeds)
    plans = [planned(chosen, chosen.dtype, seed) for seed in seeds]
    found: list[Trace] = []
    screen = console()
    with reporter(screen) as told:
        for plan in plans:
            start = time.perf_counter()
            told.begin(label_of(plan, chosen.side), plan.steps)
            found.append(
                train.run(
                    chosen.side,
                    plan,
                    told.step,
                    resume=chosen.resume,
                    stop=chosen.stop,
                    save=chosen.save,
                )
            )
            screen.print(summary(found[-1], time.perf_counter() - start), soft_wrap=True)
    record(found, chosen.out)
    draw(found, chosen.picture)
    return EQUAL


def precision_command(chosen: argparse.Namespace) -> int:
    """Train every dtype and seed, or read such runs, and judge them."""
    start, screen = time.perf_counter(), console()
    if chosen.traces is not None:
        found = traces.read(chosen.traces)
    else:
        with reporter(screen, EVERY) as told:
            found = train_all(chosen, told)
        record(found, chosen.out)
    seconds = time.perf_counter() - start
    judgement = precision.judge(found)
    precision_report.show(judgement, screen)
    if chosen.json is not None:
        place = "cpu" if found[0].header.side == "reference" else engine().name
        result = precision_report.as_json(judgement, engine=place, seconds=seconds)
        chosen.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    draw(found, chosen.picture)
    if not judgement.learned:
        return TOO_LITTLE
    return EQUAL if judgement.reaches else DIFFERS


def train_all(chosen: argparse.Namespace, told: Reporter) -> list[Trace]:
    """Train every run of a judgement, one after the other."""
    found = []
    for plan in precision.plans(
        optimizer=chosen.optimizer,
        steps=chosen.steps,
        seeds=chosen.seeds,
        accumulate=chosen.accumulate,
        broken=chosen.broken,
    ):
        told.begin(label_of(plan, chosen.side), plan.steps)
        found.append(train.run(chosen.side, plan, told.step))
    return found


def compare_command(chosen: argparse.Namespace) -> int:
    """Compare two files of traces, run by run; their headers may differ."""
    left, right = traces.read(chosen.left), traces.read(chosen.right)
    if len(left) != len(right):
        print(f"DIFFERS {len(left)} runs and {len(right)} runs")
        return DIFFERS
    for index, (ours, theirs) in enumerate(zip(left, right, strict=True)):
        found = traces.first_difference(ours, theirs)
        if found is None and ours.held_out != theirs.held_out:
            found = f"held-out loss: {ours.held_out} and {theirs.held_out}"
        if found is not None:
            print(f"DIFFERS run {index + 1} {found}")
            return DIFFERS
    print(f"equal: every step of {len(left)} run{'s' if len(left) > 1 else ''}")
    return EQUAL


def picture_command(chosen: argparse.Namespace) -> int:
    """Draw recorded traces."""
    draw(traces.read(chosen.trace), chosen.picture)
    return EQUAL


COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "lockstep": lockstep_command,
    "train": train_command,
    "precision": precision_command,
    "compare": compare_command,
    "picture": picture_command,
}


def label_of(plan: Plan, side: str) -> str:
    """A run in a few words."""
    name = precision.label_of(plan.dtype, plan.broken)
    return f"{plan.optimizer} {name}, {side}, seed {plan.seed}"


def summary(trace: Trace, seconds: float) -> str:
    """A run that has ended, in one line."""
    before, after = trace.held_out
    return (
        f"{len(trace.records)} steps, {len(trace.skipped)} skipped, held-out loss {before:.4f} -> "
        f"{after:.4f} nats per byte, {trace.header.parameters:,} parameters, {seconds:.1f} s"
    )


def record(found: Sequence[Trace], path: Path | None) -> None:
    """Write traces, where asked for."""
    if path is not None:
        traces.write(found, path)


def draw(found: Sequence[Trace], path: Path | None) -> None:
    """Draw traces, where asked for: one run by itself, several together."""
    if path is None:
        return
    if len(found) == 1:
        picture.draw(found[0], path)
    else:
        comparison_picture.draw(found, path)
