"""Record our own traces, from the reference: LAMB, which others run on a GPU alone."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from twinstep.golden.record import finish, name_of
from twinstep.golden.runs import OWN
from twinstep.golden.sequences import Situation
from twinstep.golden.trace import TRACES, Header, Trace
from twinstep.parity.proof.golden.replay import replayed
from twinstep.parity.records.errors import EXIT_USAGE

VERSION = "0.1.0"
SUBJECTS = {"lamb": "fused_lamb.FusedLamb", "flat_lamb": "fp16.FP16Optimizer"}


def record(situation: Situation) -> Trace:
    """Run the reference, with our default, through a situation."""
    header = Header(
        name=name_of(situation),
        package="twinstep",
        version=VERSION,
        subject=f"twinstep.reference.optimizers.{SUBJECTS[situation.rule]}",
        command="parity golden record twinstep",
        rule=situation.rule,
        constants=situation.constants,
        start={"scale": situation.scale},
        steps=situation.steps,
    )
    return Trace(header=header, steps=replayed(header))


def main(arguments: Sequence[str]) -> int:
    """Record all; the exit code."""
    parser = argparse.ArgumentParser(prog="parity golden record twinstep")
    parser.add_argument("folder", nargs="?", type=Path, default=TRACES)
    parser.add_argument("--reason", help="of traces that come out otherwise than before")
    try:
        given = parser.parse_args(arguments)
    except SystemExit as left:  # argparse has printed the reason, or the help
        return left.code if isinstance(left.code, int) else EXIT_USAGE
    return finish([record(run) for run in OWN], "twinstep", given.folder, given.reason)
