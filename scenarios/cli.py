"""The scenario commands: `lockstep`, `train` and `picture`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from parity.errors import UsageError
from scenarios import lockstep, picture, train
from scenarios import trace as traces
from scenarios.plan import DTYPES, RULES, Plan
from scenarios.sides import SIDES, engine
from scenarios.text import TextMissing
from scenarios.trace import StepRecord, Trace

EQUAL, DIFFERS, USAGE = 0, 1, 2
SHOWN = 10  # differences printed before the rest is only counted

HEADING = "step    loss       scale   gradient norm"


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    top = argparse.ArgumentParser(
        prog="scenarios",
        description="Train a small language model on the standard library's source.",
        epilog="Exit codes: 0 equal, 1 the sides differ, 2 usage.",
    )
    commands = top.add_subparsers(dest="command", required=True)
    both = commands.add_parser("lockstep", help="put every step through both sides and compare")
    both.add_argument("--dtype", choices=[*DTYPES, "all"], default="fp16")
    both.add_argument("--layout", choices=[*lockstep.LAYOUTS, "both"], default="both")
    add_shared(both, steps=16, window=4)
    both.set_defaults(act=lockstep_command)
    one = commands.add_parser("train", help="train with one side and record a trace")
    one.add_argument("--dtype", choices=list(DTYPES), default="fp16")
    one.add_argument("--side", choices=SIDES, default="reference")
    one.add_argument("--out", type=new_file, metavar="FILE", help="write the trace as JSON lines")
    add_shared(one, steps=300, window=20)
    one.set_defaults(act=train_command)
    drawn = commands.add_parser("picture", help="draw a recorded trace")
    drawn.add_argument("trace", type=Path, help="a file that train --out wrote")
    drawn.add_argument("picture", type=new_picture, help="the image to write, such as run.png")
    drawn.set_defaults(act=picture_command)
    return top


def add_shared(command: argparse.ArgumentParser, *, steps: int, window: int) -> None:
    """Options that every run takes."""
    command.add_argument("--steps", type=positive, default=steps, help=f"default {steps}")
    command.add_argument("--seed", type=natural, default=0, help="of weights and batches")
    command.add_argument("--ranks", type=positive, default=1, help="batches per step, one per rank")
    command.add_argument("--rule", choices=RULES, default="dynamic", help="loss-scale rule in fp16")
    command.add_argument(
        "--window", type=positive, default=window, help="clean steps before the scale grows"
    )
    command.add_argument("--picture", type=new_picture, metavar="FILE", help="draw the run")


def plan_of(chosen: argparse.Namespace, dtype: str) -> Plan:
    """The run that the options ask for."""
    return Plan(
        dtype=dtype,
        steps=chosen.steps,
        seed=chosen.seed,
        ranks=chosen.ranks,
        rule=chosen.rule,
        scale_window=chosen.window,
    )


def positive(word: str) -> int:
    """A whole number, at least 1."""
    return at_least(1, word)


def natural(word: str) -> int:
    """A whole number, at least 0."""
    return at_least(0, word)


def new_file(word: str) -> Path:
    """A file to write, in a folder that exists: found out before the run, not after it."""
    path = Path(word)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{word!r} should lie in a folder that exists")
    return path


def new_picture(word: str) -> Path:
    """An image file to write, in a format that can be drawn."""
    if Path(word).suffix not in picture.SUFFIXES:
        raise argparse.ArgumentTypeError(f"{word!r} should end in {', '.join(picture.SUFFIXES)}")
    return new_file(word)


def at_least(least: int, word: str) -> int:
    """The number that a word spells."""
    if not word.isdecimal() or int(word) < least:
        raise argparse.ArgumentTypeError(f"{word!r} should be a whole number, at least {least}")
    return int(word)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; see `scenarios.main`."""
    try:
        chosen = parser().parse_args(argv)
    except SystemExit as left:  # argparse has said why, or printed the help
        return left.code if isinstance(left.code, int) else USAGE
    act: Callable[[argparse.Namespace], int] = chosen.act
    try:
        return act(chosen)
    except UsageError as problem:
        print(f"scenarios {chosen.command}: {problem}", file=sys.stderr)
        return problem.exit_code
    except (TextMissing, traces.TraceUnreadable, picture.PictureImpossible, OSError) as problem:
        print(f"scenarios {chosen.command}: {problem}", file=sys.stderr)
        return USAGE


def show(record: StepRecord) -> None:
    """Print one step; flushed, so a pipe sees progress too."""
    note = "  skipped: the gradients overflowed" if record.skipped else ""
    line = f"{record.step:4d}  {record.loss:6.4f}  {record.scale:10g}  {record.norm:14.6g}{note}"
    print(line, flush=True)


def lockstep_command(chosen: argparse.Namespace) -> int:
    """Run both sides for each dtype asked for; the first that differs ends the command."""
    for dtype in DTYPES if chosen.dtype == "all" else [chosen.dtype]:
        if lockstep_dtype(chosen, dtype) == DIFFERS:
            return DIFFERS
    return EQUAL


def lockstep_dtype(chosen: argparse.Namespace, dtype: str) -> int:
    """Run both sides for one dtype and print the verdict."""
    start = time.perf_counter()
    print(f"language_model, {dtype}: reference and fast on every step, engine {engine().name}")
    print(HEADING, flush=True)
    report = lockstep.run(
        plan_of(chosen, dtype),
        layouts=lockstep.LAYOUTS if chosen.layout == "both" else (chosen.layout,),
        progress=show,
    )
    finish(report.trace, chosen.picture, time.perf_counter() - start)
    print(f"compared {report.compared:,} values of {', '.join(report.operations)}")
    for difference in report.differences[:SHOWN]:
        print(f"DIFFERS {difference}")
    if len(report.differences) > SHOWN:
        print(f"... and {len(report.differences) - SHOWN} more tensors")
    print("differs" if report.differences else "equal: every bit, on every step", flush=True)
    return DIFFERS if report.differences else EQUAL


def train_command(chosen: argparse.Namespace) -> int:
    """Train with one side, print the steps, write what was asked for."""
    start = time.perf_counter()
    print(f"language_model, {chosen.dtype}, {chosen.side}")
    print(HEADING, flush=True)
    trace = train.run(chosen.side, plan_of(chosen, chosen.dtype), progress=show)
    if chosen.out is not None:
        traces.write(trace, chosen.out)
    finish(trace, chosen.picture, time.perf_counter() - start)
    return EQUAL


def picture_command(chosen: argparse.Namespace) -> int:
    """Draw a recorded trace."""
    picture.draw(traces.read(chosen.trace), chosen.picture)
    return EQUAL


def finish(trace: Trace, path: Path | None, seconds: float) -> None:
    """Print the summary of a run and draw it where a picture was asked for."""
    before, after = trace.held_out
    print(
        f"{len(trace.records)} steps, {len(trace.skipped)} skipped, held-out loss {before:.4f} -> "
        f"{after:.4f} nats per byte, {trace.header.parameters:,} parameters, {seconds:.1f} s"
    )
    if path is not None:
        picture.draw(trace, path)
