"""Loss against steps: every dtype, ZeRO stage, number of ranks and side, beside DeepSpeed's own.

Stage 0 is the wrapper of the dtype, stages 1 and 2 are ZeRO. Each step has four micro-batches: of
one rank, or one for each of four simulated ranks. All runs begin with the same weights and read the
same text. The two sides must agree in every bit of every step: loss, scale, norm, masters, moments.

DeepSpeed runs on one process. Nothing is clipped, because its norm is rounded more than once and
ours is not; the scale does not grow, because a step of growth is its edge LS-1. Without ZeRO its
engine has FP16_UnfusedOptimizer for both 16-bit dtypes, which adds up micro-batches in 16 bits and
takes a step when it is built (edge UF-5): it is compared with ours made so, `Plan.as_deepspeed`.
Then every loss must have the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from twinstep.scenarios import processes, train
from twinstep.scenarios.calls import SIDES, engine
from twinstep.scenarios.curves_picture import draw_curves
from twinstep.scenarios.plan import DTYPES, Plan
from twinstep.scenarios.precision import SHAPE
from twinstep.scenarios.ranks import Ranks
from twinstep.scenarios.trace import Header, Trace, environment, first_difference
from twinstep.scenarios.trainers import ALONE
from twinstep.scenarios.words import at_least, new_file, new_picture

STEPS, MICRO_BATCHES = 60, 4
STAGES = {0: "adam", 1: "zero1", 2: "zero2"}
COUNTS = (1, 4)
PATIENCE = 300.0
PROGRAM = "twinstep.scenarios.curves_deepspeed"
DEEPSPEED, AS_DEEPSPEED = "DeepSpeed", "reference as DeepSpeed"
CPU_ONLY = {"DS_ACCELERATOR": "cpu", "TORCH_COMPILE_DISABLE": "1"}
Said = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One run.

    Attributes:
        side: "reference", "fast", `DEEPSPEED` or `AS_DEEPSPEED`.
        dtype: of the model.
        stage: of ZeRO; 0 is without it.
        ranks: of the run.
        losses: training loss of each step, mean over micro-batches.
        skipped: steps that overflowed.
        held_out: loss on unseen text after the last step.
    """

    side: str
    dtype: str
    stage: int
    ranks: int
    losses: Sequence[float]
    skipped: Sequence[int]
    held_out: float

    @property
    def where(self) -> tuple[str, int, int]:
        """The place of a run: dtype, stage and ranks, whatever the side."""
        return self.dtype, self.stage, self.ranks

    @property
    def digest(self) -> str:
        """Of the bits of every loss."""
        bits = " ".join(loss.hex() for loss in self.losses)
        return hashlib.sha256(bits.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Two runs of one dtype, stage and number of ranks beside each other.

    Attributes:
        dtype, stage, ranks: of both.
        left, right: sides.
        differs: the first step and field in which they differ; empty where they are equal.
    """

    dtype: str
    stage: int
    ranks: int
    left: str
    right: str
    differs: str

    def __str__(self) -> str:
        runs = (
            f"{self.dtype:4}  ZeRO {self.stage}  ranks {self.ranks}  {self.left} and {self.right}"
        )
        return f"{runs}: {f'DIFFER {self.differs}' if self.differs else 'equal'}"


@dataclass(frozen=True, kw_only=True)
class Curves:
    """All runs, and what was found.

    Attributes:
        header: of the first run.
        steps: of each.
        curves: in the order in which they ran.
        verdicts: on both sides, then on DeepSpeed.
        deepspeed: its version, or why it has no curves.
        seconds: that all of it took.
    """

    header: Header
    steps: int
    curves: Sequence[Curve]
    verdicts: Sequence[Verdict]
    deepspeed: str
    seconds: float

    @property
    def sides_differ(self) -> bool:
        """True if the fast side and the reference differ anywhere."""
        return any(verdict.differs for verdict in self.verdicts if verdict.right in SIDES)


def plan_of(dtype: str, stage: int, steps: int) -> Plan:
    """The plan of a run, which no side and no number of ranks changes."""
    return Plan(
        optimizer=STAGES[stage],
        dtype=dtype,
        steps=steps,
        accumulate=MICRO_BATCHES,
        rule="wrapper",
        scale_window=10 * steps,
        held_out=16,
        shape=SHAPE,
        max_norm=1e9,
    )


def run_all(steps: int, python: str, said: Said, dtypes: Sequence[str] = ()) -> Curves:
    """Train every run, and compare the sides.

    Args:
        steps: of each run.
        python: an interpreter that may have DeepSpeed.
        said: takes a line about every run as it ends.
        dtypes: of the runs; empty is all.
    """
    start, curves, verdicts = time.perf_counter(), list[Curve](), list[Verdict]()
    headers = list[Header]()
    wanted = list(dtypes or DTYPES)
    for dtype, stage, count in [(d, s, c) for d in wanted for s in STAGES for c in COUNTS]:
        traces = [run(side, plan_of(dtype, stage, steps), count) for side in SIDES]
        headers += [trace.header for trace in traces]
        curves += [curve_of(trace, stage) for trace in traces]
        differs = difference(*traces)
        verdicts.append(_verdict(curves[-2], curves[-1], differs))
        said(f"{verdicts[-1]}, held-out loss {curves[-1].held_out:.4f}")
    theirs, deepspeed = _deepspeed(python, steps, wanted)
    ours = {curve.where: curve for curve in curves if curve.side == "reference"}
    for curve in theirs:
        like = ours[curve.where]
        if curve.stage == 0 and curve.dtype != "fp32":
            plan = replace(plan_of(curve.dtype, 0, steps), as_deepspeed=True)
            like = replace(curve_of(run("reference", plan, 1), 0), side=AS_DEEPSPEED)
            curves.append(like)
        verdicts.append(_verdict(like, curve, losses_differ(like, curve)))
        said(f"{verdicts[-1]}, held-out loss {curve.held_out:.4f}")
    return Curves(
        header=headers[0],
        steps=steps,
        curves=[*curves, *theirs],
        verdicts=verdicts,
        deepspeed=deepspeed,
        seconds=time.perf_counter() - start,
    )


def run(side: str, plan: Plan, count: int) -> Trace:
    """One run of one side, on simulated ranks where there are several."""
    found: list[Trace] = []

    def on(ranks: Ranks) -> None:
        trace = train.run(side, plan, ranks=ranks)
        if ranks.number == 0:
            found.append(trace)

    with train.one_thread():
        on(ALONE) if count == 1 else processes.simulate(count, PATIENCE, on)
    return found[0]


def curve_of(trace: Trace, stage: int) -> Curve:
    """The losses of a run."""
    return Curve(
        side=trace.header.side,
        dtype=trace.header.dtype,
        stage=stage,
        ranks=trace.header.ranks,
        losses=trace.column("loss"),
        skipped=trace.skipped,
        held_out=trace.held_out[1],
    )


def difference(reference: Trace, fast: Trace) -> str:
    """The first step and field in which two runs differ, or the loss at the end; else empty."""
    found = first_difference(reference, fast)
    if found is None and reference.held_out != fast.held_out:
        return f"held-out loss: {reference.held_out[1]} and {fast.held_out[1]}"
    return found or ""


def losses_differ(ours: Curve, theirs: Curve) -> str:
    """The first step in which two runs have another loss, or skip; empty where none does."""
    for at, pair in enumerate(zip(ours.losses, theirs.losses, strict=True), 1):
        if pair[0] != pair[1]:
            return f"step {at} loss: {pair[0].hex()} and {pair[1].hex()}"
        if (at in ours.skipped) != (at in theirs.skipped):
            who = ours.side if at in ours.skipped else theirs.side
            return f"step {at}: only {who} skips it"
    if ours.held_out != theirs.held_out:
        return f"held-out loss: {ours.held_out} and {theirs.held_out}"
    return ""


def _verdict(left: Curve, right: Curve, differs: str) -> Verdict:
    dtype, stage, ranks = left.where
    return Verdict(
        dtype=dtype,
        stage=stage,
        ranks=ranks,
        left=left.side,
        right=right.side,
        differs=differs,
    )


def _deepspeed(python: str, steps: int, dtypes: Sequence[str]) -> tuple[Sequence[Curve], str]:
    """DeepSpeed's runs in a process of their own, and its version; or none, and why."""
    root = str(Path(__file__).resolve().parents[1])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    try:
        ended = subprocess.run(
            [python, "-m", PROGRAM, str(steps), *dtypes],
            env={**os.environ, **CPU_ONLY, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as problem:
        return [], f"left out, {python}: {problem.strerror}"
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["it gives no reason"])[-1]
        return [], f"left out, {last}"
    found = json.loads(ended.stdout.splitlines()[-1])
    return [Curve(**curve) for curve in found["curves"]], found["version"]


def as_json(found: Curves) -> dict[str, object]:
    """All runs for a file; runs with the same losses share them."""
    losses: dict[str, Sequence[float]] = {}
    rows = []
    for curve in found.curves:
        losses.setdefault(curve.digest, [round(loss, 5) for loss in curve.losses])
        names = ("side", "dtype", "stage", "ranks", "skipped", "held_out")
        rows.append({name: getattr(curve, name) for name in names} | {"curve": curve.digest})
    return {
        "schema": 1,
        "steps": found.steps,
        "micro_batches": MICRO_BATCHES,
        "parameters": found.header.parameters,
        "text_sha256": found.header.text_sha256,
        "engine": engine().name,
        **environment(),
        "threads": found.header.threads,
        "deepspeed": found.deepspeed,
        "seconds": round(found.seconds, 1),
        "verdicts": [asdict(verdict) for verdict in found.verdicts],
        "runs": rows,
        "curves": losses,
    }


def add_curves(command: argparse.ArgumentParser) -> None:
    """Options of `curves`."""
    add = command.add_argument
    add("--steps", type=at_least(2), default=STEPS, help=f"of each run (default {STEPS})")
    add("--dtype", choices=[*DTYPES, "all"], default="all")
    python = "a Python with DeepSpeed (default: this one)"
    add("--deepspeed", default=sys.executable, metavar="PYTHON", help=python)
    add("--json", type=new_file, metavar="FILE", help="write all curves and verdicts")
    add("--picture", type=new_picture, metavar="FILE", help="draw them")


def curves_command(chosen: argparse.Namespace) -> int:
    """Train every run, print each comparison; 1 where the two sides differ, and in which step."""

    def said(line: str) -> None:
        print(line, flush=True)

    dtypes = [] if chosen.dtype == "all" else [chosen.dtype]
    found = run_all(chosen.steps, chosen.deepspeed, said, dtypes)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(as_json(found), indent=1) + "\n", encoding="utf-8")
    if chosen.picture is not None:
        draw_curves(as_json(found), chosen.picture)
    print(f"{len(found.curves)} runs of {found.steps} steps, {found.seconds:.0f} s; ", end="")
    print(f"{DEEPSPEED}: {found.deepspeed}")
    print("the sides differ" if found.sides_differ else "equal: both sides, every bit")
    return int(found.sides_differ)
