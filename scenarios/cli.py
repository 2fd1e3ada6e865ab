"""The scenario commands: those of the language model, and one for each named scenario."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from twinstep.parity.records.errors import UsageError
from twinstep.parity.records.names import unknown
from twinstep.scenarios import curves, lockstep, memory, pictures, precision, processes, train
from twinstep.scenarios import trace as traces
from twinstep.scenarios.calls import SIDES, engine
from twinstep.scenarios.model import Shape
from twinstep.scenarios.named.command import add_named, listing, named_command
from twinstep.scenarios.named.table import TABLE
from twinstep.scenarios.plan import BROKEN, DTYPES, OPTIMIZERS, RULES, UNSHARDED, Plan
from twinstep.scenarios.progress import Lines, reporter
from twinstep.scenarios.ranks import Ranks
from twinstep.scenarios.text import TextMissing
from twinstep.scenarios.trace import Trace
from twinstep.scenarios.words import at_least, new_file, new_picture

EQUAL, DIFFERS, USAGE, TOO_LITTLE = 0, 1, 2, 3
SHOWN = 10  # differences printed before the rest is only counted
EVERY = 50  # steps between two lines of `precision` to a pipe
REFUSED = (
    TextMissing,
    traces.TraceUnreadable,
    precision.TracesUnfit,
    train.CheckpointUnfit,
    pictures.PictureImpossible,
    processes.RankRefused,
    OSError,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; see `scenarios.main`."""
    words = sys.argv[1:] if argv is None else argv
    if words and not words[0].startswith("-") and words[0] not in {*COMMANDS, *TABLE}:
        said = unknown("command", words[0], {*COMMANDS, *TABLE}, "parity scenario list")
        print(f"scenarios: {said}", file=sys.stderr)
        return USAGE
    try:
        chosen = parser().parse_args(argv)
    except SystemExit as left:  # argparse has printed the reason, or the help
        return left.code if isinstance(left.code, int) else USAGE
    coded = (UsageError, processes.RankLost)
    try:
        if chosen.command in TABLE:
            return named_command(chosen, console())
        return COMMANDS[chosen.command](chosen)
    except (*coded, *REFUSED) as problem:
        print(f"scenarios {chosen.command}: {problem}", file=sys.stderr)
        return problem.exit_code if isinstance(problem, coded) else USAGE
    finally:
        if processes.started_by_torchrun():
            gc.collect()  # see `processes.joined`


def parser() -> argparse.ArgumentParser:
    """The grammar; each command's name is `chosen.command`."""
    top = argparse.ArgumentParser(
        prog="scenarios",
        description="Train a small language model on the standard library's source.",
        epilog=(
            "Exit codes: 0 equal, 1 the sides differ or a dtype does not reach fp32, 2 usage, "
            "3 too little ran, 4 a rank was lost."
        ),
    )
    commands = top.add_subparsers(dest="command", required=True)
    add_lockstep(commands.add_parser("lockstep", help="put every step through both sides"))
    add_train(commands.add_parser("train", help="train with one side and record traces"))
    add_precision(commands.add_parser("precision", help="fp16 and bf16 against fp32"))
    everything = "loss of every dtype, side, ZeRO stage and number of ranks, beside DeepSpeed"
    curves.add_curves(commands.add_parser("curves", help=everything))
    sizes = commands.add_parser("memory", help="bytes of a rank of ZeRO, by formula and counted")
    memory.add_memory(sizes, at_least(1))
    both = commands.add_parser("compare", help="find the first difference of two records")
    both.add_argument("left", type=Path, help="a file that train --out wrote")
    both.add_argument("right", type=Path, help="another one")
    commands.add_parser("list", help="the named scenarios")
    for row in TABLE.values():
        add_named(commands.add_parser(row.name, help=row.about), row)
    drawn = commands.add_parser("picture", help="draw recorded traces")
    drawn.add_argument("trace", type=Path, help="a file that train --out wrote")
    drawn.add_argument("picture", type=new_picture, help="the image to write, such as run.png")
    return top


def add_lockstep(command: argparse.ArgumentParser) -> None:
    """Options of `lockstep`."""
    add = command.add_argument
    add("--dtype", choices=[*DTYPES, "all"], default="fp16")
    add("--layout", choices=[*lockstep.LAYOUTS, "both"], default="both")
    add("--accumulate", type=at_least(1), default=1, help="micro-batches per step")
    add_run(command, steps=16, window=4, rule="dynamic")
    command.set_defaults(optimizer="mixed_step", broken="none", exact_sums=False, offload=False)
    command.set_defaults(width=Shape.width, layers=Shape.layers)


def add_train(command: argparse.ArgumentParser) -> None:
    """Options of `train`."""
    add = command.add_argument
    add("--dtype", choices=list(DTYPES), default="fp16")
    add("--side", choices=SIDES, default="reference")
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        default="adam",
        help="what takes the step: the operation, or the optimizer classes (default adam)",
    )
    exact = "ZeRO: round gradients so that any number of ranks gives the same bits"
    add("--exact-sums", action="store_true", help=exact)
    add("--offload", action="store_true", help="ZeRO: pass the offload option on, device cpu")
    add("--seeds", type=at_least(1), default=1, help="runs, one seed after the other")
    add("--ranks", type=at_least(1), help="processes that share the micro-batches (default 1)")
    add("--simulated", action="store_true", help="ranks that take turns in this process")
    shared = "micro-batches per step, over all ranks (default one for each)"
    add("--accumulate", type=at_least(1), help=shared)
    width = f"of the model, a multiple of {Shape.heads} (default {Shape.width})"
    add("--width", type=at_least(1), default=Shape.width, help=width)
    add("--layers", type=at_least(1), default=Shape.layers, help=f"default {Shape.layers}")
    add("--timeout", type=at_least(1), default=600, help="seconds until a rank is given up")
    add("--broken", choices=list(BROKEN), default="none", help="on purpose")
    add("--stop", type=at_least(1), help="stop after this step of the plan")
    add("--save", type=new_file, metavar="FILE", help="write a checkpoint after the last step")
    add("--save-every", type=at_least(1), metavar="N", help="and after every N steps")
    add("--resume", type=Path, metavar="FILE", help="go on from a checkpoint")
    add("--out", type=new_file, metavar="FILE", help="write traces as JSON lines")
    add_run(command, steps=300, window=20, rule="wrapper")


def add_run(command: argparse.ArgumentParser, *, steps: int, window: int, rule: str) -> None:
    """Options that `lockstep` and `train` share."""
    add = command.add_argument
    add("--steps", type=at_least(1), default=steps, help=f"default {steps}")
    add("--seed", type=at_least(0), default=0, help="of weights and batches")
    scaling = f"loss-scale rule in fp16 (default {rule})"
    add("--rule", choices=RULES, default=rule, help=scaling)
    add("--window", type=at_least(1), default=window, help="clean steps before the scale grows")
    add("--picture", type=new_picture, metavar="FILE", help="draw the run")


def add_precision(command: argparse.ArgumentParser) -> None:
    """Options of `precision`."""
    add, steps = command.add_argument, precision.STEPS
    add("--side", choices=SIDES, default="fast")
    add("--optimizer", choices=UNSHARDED, default="adam")
    add("--steps", type=at_least(1), default=steps, help=f"default {steps}")
    add("--seeds", type=at_least(2), default=precision.SEEDS, help="at least 2")
    add("--accumulate", type=at_least(1), default=1, help="micro-batches per step")
    broken = "judge what should not reach fp32"
    add("--broken", choices=list(BROKEN), default="none", help=broken)
    add("--traces", type=Path, metavar="FILE", help="judge recorded runs instead of training")
    add("--out", type=new_file, metavar="FILE", help="write traces as JSON lines")
    add("--json", type=new_file, metavar="FILE", help="write the judgement")
    add("--picture", type=new_picture, metavar="FILE", help="draw all runs")


def plan_of(chosen: argparse.Namespace, dtype: str, seed: int) -> Plan:
    """The run that the options ask for.

    Raises:
        UsageError: the options do not go together.
    """
    try:
        return Plan(
            optimizer=chosen.optimizer,
            dtype=dtype,
            steps=chosen.steps,
            seed=seed,
            accumulate=chosen.accumulate,
            rule=chosen.rule,
            scale_window=chosen.window,
            broken=chosen.broken,
            exact_sums=chosen.exact_sums,
            offload=chosen.offload,
            shape=Shape(width=chosen.width, layers=chosen.layers),
        )
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
    start, lines, plan = time.perf_counter(), Lines(), plan_of(chosen, dtype, chosen.seed)
    label = f"language_model, {dtype}: reference and fast on every step, engine "
    label += engine(replays=True).name
    lines.begin(label, plan.steps)
    layouts = lockstep.LAYOUTS if chosen.layout == "both" else (chosen.layout,)
    run = lockstep.run(plan, layouts=layouts, progress=lines.step)
    print(summary(run.trace, start))
    draw([run.trace], chosen.picture)
    print(f"compared {run.compared:,} values of {', '.join(sorted(run.operations))}")
    for difference in run.differences[:SHOWN]:
        print(f"DIFFERS {difference}")
    if len(run.differences) > SHOWN:
        print(f"... and {len(run.differences) - SHOWN} more tensors")
    print("differs" if run.differences else "equal: every bit, on every step", flush=True)
    return DIFFERS if run.differences else EQUAL


def console() -> Console:
    """Standard output; wide where it is no terminal."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 150)


def train_command(chosen: argparse.Namespace) -> int:
    """Train with one side, on as many ranks as were asked for or as torchrun has started."""
    if chosen.seeds > 1 and (chosen.stop or chosen.save or chosen.resume):
        raise UsageError("--stop, --save and --resume go with one seed [--seeds]")
    if chosen.save_every and not chosen.save:
        raise UsageError("--save-every goes with --save [--save-every]")
    started = processes.started_by_torchrun()
    ranks = chosen.ranks or started or 1
    chosen.accumulate = chosen.accumulate or ranks
    if started and chosen.simulated:
        raise UsageError(f"--simulated, but torchrun has started {started} ranks [--simulated]")
    if started not in (0, ranks):
        raise UsageError(f"ranks={ranks}, but torchrun has started {started} [--ranks]")
    if chosen.accumulate % ranks:
        raise UsageError(
            f"ranks={ranks}, but should divide the {chosen.accumulate} micro-batches of a step "
            "[--ranks, --accumulate]"
        )
    seeds = range(chosen.seed, chosen.seed + chosen.seeds)
    plans = [plan_of(chosen, chosen.dtype, seed) for seed in seeds]
    if started:
        with processes.joined(chosen.side, chosen.timeout) as joined:
            train_plans(chosen, plans, joined)
    elif chosen.simulated:
        with train.one_thread():
            processes.simulate(ranks, chosen.timeout, partial(train_plans, chosen, plans))
    elif ranks > 1:
        train_rank = partial(train_or_refuse, chosen, plans)
        processes.launch(ranks, chosen.side, chosen.timeout, train_rank)
    else:
        train_plans(chosen, plans, Ranks())
    return EQUAL


def train_or_refuse(chosen: argparse.Namespace, plans: Sequence[Plan], ranks: Ranks) -> None:
    """The same in a process of its own, which hands every refusal on as one kind of error."""
    try:
        train_plans(chosen, plans, ranks)
    except REFUSED as problem:
        raise processes.RankRefused(str(problem)) from problem


def train_plans(chosen: argparse.Namespace, plans: Sequence[Plan], ranks: Ranks) -> None:
    """Run the plans, print the steps; rank 0 writes what was asked for."""
    found: list[Trace] = []
    screen = console()
    files = {"resume": chosen.resume, "stop": chosen.stop}
    files |= {"save": chosen.save, "every": chosen.save_every}
    if ranks.number:
        for plan in plans:
            train.run(chosen.side, plan, ranks=ranks, **files)
        return
    with reporter(screen) as told:
        for plan in plans:
            start = time.perf_counter()
            told.begin(label_of(plan, chosen.side), plan.steps)
            found.append(train.run(chosen.side, plan, told.step, ranks=ranks, **files))
            screen.print(summary(found[-1], start), soft_wrap=True)
    record(found, chosen.out)
    draw(found, chosen.picture)


def precision_command(chosen: argparse.Namespace) -> int:
    """Train every dtype and seed, or read such runs, and judge them."""
    start, screen = time.perf_counter(), console()
    found = train_all(chosen, screen) if chosen.traces is None else traces.read(chosen.traces)
    seconds = time.perf_counter() - start
    judgement = precision.judge(found)
    precision.show(judgement, screen)
    if chosen.json is not None:
        place = "cpu" if found[0].header.side == "reference" else engine().name
        result = precision.as_json(judgement, engine=place, seconds=seconds)
        chosen.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    draw(found, chosen.picture)
    if not judgement.learned:
        return TOO_LITTLE
    return DIFFERS if judgement.outside else EQUAL


def train_all(chosen: argparse.Namespace, screen: Console) -> list[Trace]:
    """Train every run of a judgement, one after the other, and record them."""
    names = ("optimizer", "steps", "seeds", "accumulate", "broken")
    plans = precision.plans(**{name: getattr(chosen, name) for name in names})
    found = []
    with reporter(screen, EVERY) as told:
        for plan in plans:
            told.begin(label_of(plan, chosen.side), plan.steps)
            found.append(train.run(chosen.side, plan, told.step))
    record(found, chosen.out)
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


def list_command(_: argparse.Namespace) -> int:
    """Print the named scenarios, and the commands that are none."""
    print(f"{listing()}\n\nOther commands: {', '.join(COMMANDS)}")
    return EQUAL


COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "lockstep": lockstep_command,
    "train": train_command,
    "precision": precision_command,
    "curves": curves.curves_command,
    "memory": memory.memory_command,
    "compare": compare_command,
    "picture": picture_command,
    "list": list_command,
}


def label_of(plan: Plan, side: str) -> str:
    """A run in a few words."""
    return f"{plan.optimizer} {precision.label_of(plan)}, {side}, seed {plan.seed}"


def summary(trace: Trace, start: float) -> str:
    """A run that has ended, in one line; it began at `start` of `time.perf_counter`."""
    before, after = trace.held_out
    return (
        f"{len(trace.records)} steps, {len(trace.skipped)} skipped, held-out loss {before:.4f} -> "
        f"{after:.4f} nats per byte, {trace.header.parameters:,} parameters, "
        f"{time.perf_counter() - start:.1f} s"
    )


def record(found: Sequence[Trace], path: Path | None) -> None:
    """Write traces, where asked for."""
    if path is not None:
        traces.write(found, path)


def draw(found: Sequence[Trace], path: Path | None) -> None:
    """Draw traces, where asked for: one run by itself, several together."""
    if path is not None:
        pictures.draw(found, path)
