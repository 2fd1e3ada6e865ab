"""The command line's grammar: commands, options, and what a word may be."""

from __future__ import annotations

import argparse
from pathlib import Path

from twinstep.scenarios import lockstep, picture, precision
from twinstep.scenarios.plan import BROKEN, DTYPES, OPTIMIZERS, RULES, Plan
from twinstep.scenarios.sides import SIDES


def parser() -> argparse.ArgumentParser:
    """The grammar; each command's name is `chosen.command`."""
    top = argparse.ArgumentParser(
        prog="scenarios",
        description="Train a small language model on the standard library's source.",
        epilog=(
            "Exit codes: 0 equal, 1 the sides differ or a dtype does not reach fp32, 2 usage, "
            "3 too little ran."
        ),
    )
    commands = top.add_subparsers(dest="command", required=True)
    add_lockstep(commands.add_parser("lockstep", help="put every step through both sides"))
    add_train(commands.add_parser("train", help="train with one side and record traces"))
    add_precision(commands.add_parser("precision", help="fp16 and bf16 against fp32"))
    both = commands.add_parser("compare", help="find the first difference of two records")
    both.add_argument("left", type=Path, help="a file that train --out wrote")
    both.add_argument("right", type=Path, help="another one")
    drawn = commands.add_parser("picture", help="draw recorded traces")
    drawn.add_argument("trace", type=Path, help="a file that train --out wrote")
    drawn.add_argument("picture", type=new_picture, help="the image to write, such as run.png")
    return top


def add_lockstep(command: argparse.ArgumentParser) -> None:
    """Options of `lockstep`."""
    command.add_argument("--dtype", choices=[*DTYPES, "all"], default="fp16")
    command.add_argument("--layout", choices=[*lockstep.LAYOUTS, "both"], default="both")
    command.add_argument("--ranks", type=positive, default=1, help="batches per step, one per rank")
    add_run(command, steps=16, window=4, rule="dynamic")


def add_train(command: argparse.ArgumentParser) -> None:
    """Options of `train`."""
    command.add_argument("--dtype", choices=list(DTYPES), default="fp16")
    command.add_argument("--side", choices=SIDES, default="reference")
    command.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="adam",
        help="what takes the step: the operation, or the optimizer classes (default adam)",
    )
    command.add_argument("--seeds", type=positive, default=1, help="runs, one seed after the other")
    command.add_argument("--ranks", type=positive, default=1, help="of mixed_step")
    command.add_argument("--accumulate", type=positive, default=1, help="micro-batches per step")
    command.add_argument("--broken", choices=list(BROKEN), default="none", help="on purpose")
    command.add_argument("--stop", type=positive, help="stop after this step of the plan")
    command.add_argument("--save", type=new_file, metavar="FILE", help="write a checkpoint")
    command.add_argument("--resume", type=Path, metavar="FILE", help="go on from a checkpoint")
    command.add_argument("--out", type=new_file, metavar="FILE", help="write traces as JSON lines")
    add_run(command, steps=300, window=20, rule="wrapper")


def add_run(command: argparse.ArgumentParser, *, steps: int, window: int, rule: str) -> None:
    """Options that `lockstep` and `train` share."""
    command.add_argument("--steps", type=positive, default=steps, help=f"default {steps}")
    command.add_argument("--seed", type=natural, default=0, help="of weights and batches")
    command.add_argument(
        "--rule", choices=RULES, default=rule, help=f"loss-scale rule in fp16 (default {rule})"
    )
    command.add_argument(
        "--window", type=positive, default=window, help="clean steps before the scale grows"
    )
    command.add_argument("--picture", type=new_picture, metavar="FILE", help="draw the run")


def add_precision(command: argparse.ArgumentParser) -> None:
    """Options of `precision`."""
    command.add_argument("--side", choices=SIDES, default="fast")
    command.add_argument("--optimizer", choices=OPTIMIZERS[1:], default="adam")
    command.add_argument(
        "--steps", type=positive, default=precision.STEPS, help=f"default {precision.STEPS}"
    )
    command.add_argument("--seeds", type=several, default=precision.SEEDS, help="at least 2")
    command.add_argument("--accumulate", type=positive, default=1, help="micro-batches per step")
    command.add_argument(
        "--broken", choices=list(BROKEN), default="none", help="judge what should not reach fp32"
    )
    command.add_argument(
        "--traces", type=Path, metavar="FILE", help="judge recorded runs instead of training"
    )
    command.add_argument("--out", type=new_file, metavar="FILE", help="write traces as JSON lines")
    command.add_argument("--json", type=new_file, metavar="FILE", help="write the judgement")
    command.add_argument("--picture", type=new_picture, metavar="FILE", help="draw all runs")


def plan_of(chosen: argparse.Namespace, dtype: str, seed: int | None = None) -> Plan:
    """The run that the options ask for.

    Raises:
        ValueError: the options do not go together.
    """
    return Plan(
        optimizer=getattr(chosen, "optimizer", "mixed_step"),
        dtype=dtype,
        steps=chosen.steps,
        seed=chosen.seed if seed is None else seed,
        ranks=chosen.ranks,
        accumulate=getattr(chosen, "accumulate", 1),
        rule=chosen.rule,
        scale_window=chosen.window,
        broken=getattr(chosen, "broken", "none"),
    )


def positive(word: str) -> int:
    """A whole number, at least 1."""
    return at_least(1, word)


def natural(word: str) -> int:
    """A whole number, at least 0."""
    return at_least(0, word)


def several(word: str) -> int:
    """A whole number, at least 2."""
    return at_least(2, word)


def at_least(least: int, word: str) -> int:
    """The number that a word spells."""
    if not word.isdecimal() or int(word) < least:
        raise argparse.ArgumentTypeError(f"{word!r} should be a whole number, at least {least}")
    return int(word)


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
