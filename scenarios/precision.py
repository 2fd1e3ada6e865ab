"""Do fp16 and bf16 train as well as fp32, within the noise of seeds?

For every seed all dtypes begin with the same weights and read the same windows. With L(x, s) the
loss on unseen text after the last step of seed s in dtype x:

    noise      = sample standard deviation of L(fp32, s) over seeds (n - 1 in the denominator)
    difference = mean over seeds of L(x, s) - L(fp32, s)
    x reaches fp32 if |difference| <= noise

The noise is fp32's alone, so a dtype that scatters widely cannot hide in its own scatter, and a
loss that is not a number is never within it. A judgement needs runs that learned: the mean fall of
fp32's loss must be at least `LEARNED` times the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from rich import box
from rich.console import Console
from rich.table import Table

from twinstep.scenarios.model import Shape
from twinstep.scenarios.plan import BROKEN, Plan
from twinstep.scenarios.trace import Header, Trace, environment

# Fast steps on replay take time by the element; this size learns enough to tell the dtypes apart.
SHAPE = Shape(context=32, width=34, heads=2, layers=1)
STEPS, SEEDS, WINDOW = 300, 3, 40
HELD_OUT = 64  # batches: 16,384 bytes
LEARNED = 20.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """The runs of one dtype, one for each seed.

    Attributes:
        label: the dtype, and what is broken on purpose.
        traces: in the order of seeds.
    """

    label: str
    traces: Sequence[Trace]

    @property
    def header(self) -> Header:
        """The header of the first run."""
        return self.traces[0].header

    @property
    def steps(self) -> list[float]:
        """The steps of each run."""
        return self.traces[0].column("step")

    def columns(self, name: str) -> list[list[float]]:
        """One field of every step, by seed."""
        return [trace.column(name) for trace in self.traces]

    @property
    def losses(self) -> list[float]:
        """Held-out loss after the last step, by seed, in nats per byte."""
        return [trace.held_out[1] for trace in self.traces]

    @property
    def mean(self) -> float:
        """Of `losses`."""
        return fmean(self.losses)

    @property
    def spread(self) -> float:
        """Sample standard deviation of `losses`; NaN where one is not finite."""
        finite = all(math.isfinite(loss) for loss in self.losses)
        return stdev(self.losses) if finite else math.nan

    @property
    def skipped(self) -> list[int]:
        """Skipped steps, by seed."""
        return [len(trace.skipped) for trace in self.traces]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Every dtype's runs against those in fp32.

    Attributes:
        baseline: the fp32 runs.
        others: the other dtypes, in the order in which they were run.
    """

    baseline: Row
    others: Sequence[Row]

    @property
    def noise(self) -> float:
        """Spread of fp32's losses."""
        return self.baseline.spread

    @property
    def fall(self) -> float:
        """By how much fp32's loss fell, mean over seeds."""
        return fmean(before - after for before, after in (t.held_out for t in self.baseline.traces))

    @property
    def learned(self) -> bool:
        """True if fp32 learned enough for a difference to mean anything."""
        return self.fall >= LEARNED * self.noise

    def difference(self, row: Row) -> float:
        """Mean over seeds of a dtype's loss minus fp32's."""
        return row.mean - self.baseline.mean

    def reaches(self, row: Row) -> bool:
        """True if a dtype's difference is within the noise; a NaN is not."""
        return abs(self.difference(row)) <= self.noise

    @property
    def outside(self) -> list[str]:
        """Labels of the dtypes that do not reach fp32."""
        return [row.label for row in self.others if not self.reaches(row)]


class TracesUnfit(ValueError):
    """These runs cannot be judged against each other."""


def plans(
    *,
    optimizer: str = "adam",
    steps: int = STEPS,
    seeds: int = SEEDS,
    accumulate: int = 1,
    broken: str = "none",
) -> list[Plan]:
    """The runs of a judgement: every seed in fp32, then in fp16, then in bf16.

    Args:
        optimizer: "adam" or "lamb".
        steps: of every run.
        seeds: 0, 1, ...
        accumulate: micro-batches for each step.
        broken: run fp32 and this instead of fp16 and bf16; it should not reach fp32.
    """
    fp32 = Plan(
        optimizer=optimizer,
        dtype="fp32",
        steps=steps,
        accumulate=accumulate,
        rule="wrapper",
        scale_window=WINDOW,
        held_out=HELD_OUT,
        shape=SHAPE,
    )
    others = [replace(fp32, dtype=dtype) for dtype in ("fp16", "bf16")]
    if broken != "none":
        others = [replace(fp32, dtype=BROKEN[broken], broken=broken)]
    return [replace(plan, seed=seed) for plan in (fp32, *others) for seed in range(seeds)]


def label_of(run: Plan | Header) -> str:
    """The dtype of a run, and what is broken on purpose."""
    return run.dtype if run.broken == "none" else f"{run.dtype}, {run.broken}"


def rows_of(traces: Sequence[Trace]) -> list[Row]:
    """Runs by dtype and fault, in the order in which they come."""
    found: dict[str, list[Trace]] = {}
    for trace in traces:
        found.setdefault(label_of(trace.header), []).append(trace)
    return [Row(label=label, traces=runs) for label, runs in found.items()]


def judge(traces: Sequence[Trace]) -> Judgement:
    """Judge every dtype's runs against those in fp32.

    Raises:
        TracesUnfit: fp32 is missing or alone, there are fewer than two seeds, or the runs differ in
            seeds, steps, text or anything else but dtype and loss scale.
    """
    rows = rows_of(traces)
    baseline = next((row for row in rows if row.label == "fp32"), None)
    others = [row for row in rows if row.label != "fp32"]
    if baseline is None or not others:
        have = ", ".join(row.label for row in rows)
        raise TracesUnfit(f"runs are in {have}, but should be in fp32 and another dtype")
    if len(baseline.traces) < 2:
        raise TracesUnfit("runs have 1 seed, but should have at least 2 to know the noise")
    for row in others:
        _require_alike(baseline, row)
    return Judgement(baseline=baseline, others=others)


def _require_alike(baseline: Row, row: Row) -> None:
    names = ("optimizer", "steps", "batch", "accumulate", "held_out_batches", "parameters")
    for name in (*names, "text_sha256"):
        values = {getattr(trace.header, name) for r in (baseline, row) for trace in r.traces}
        if len(values) > 1:
            raise TracesUnfit(f"runs have {name} {sorted(values)}, but should have one")
    seeds = [[trace.header.seed for trace in r.traces] for r in (baseline, row)]
    if seeds[0] != seeds[1] or len(set(seeds[0])) < len(seeds[0]):
        raise TracesUnfit(
            f"{row.label} has seeds {seeds[1]}, but should have fp32's {seeds[0]}, each once"
        )
    taken = {len(trace.records) for r in (baseline, row) for trace in r.traces}
    if taken != {baseline.header.steps}:
        raise TracesUnfit(f"runs have {sorted(taken)} steps, but should have all of their plan's")


def show(judgement: Judgement, screen: Console) -> None:
    """Print every dtype's held-out losses, and the verdict in words."""
    baseline = judgement.baseline
    title = (
        f"held-out loss, nats per byte, after {baseline.header.steps} steps; "
        "spread is the sample standard deviation over seeds"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("dtype", no_wrap=True)
    seeds = [f"seed {run.header.seed}" for run in baseline.traces]
    for name in (*seeds, "mean", "spread", "difference", "of the noise", "skipped"):
        table.add_column(name, justify="right")
    table.add_column("verdict", no_wrap=True)
    for row in (baseline, *judgement.others):
        numbers = [f"{value:.4f}" for value in (*row.losses, row.mean, row.spread)]
        difference, ratio, verdict = "", "", "baseline"
        if row is not baseline:
            difference = f"{judgement.difference(row):+.4f}"
            ratio = f"{_ratio(judgement.difference(row), judgement.noise):.2f}"
            verdict = "reaches fp32" if judgement.reaches(row) else "OUTSIDE the noise"
        skipped = " ".join(map(str, row.skipped))
        table.add_row(row.label, *numbers, difference, ratio, skipped, verdict)
    screen.print(table)
    screen.print(sentence(judgement))


def sentence(judgement: Judgement) -> str:
    """The verdict in one line."""
    noise = f"the noise of {len(judgement.baseline.traces)} fp32 seeds, {judgement.noise:.4f}"
    if not judgement.learned:
        return (
            f"too little ran: fp32's loss fell by {judgement.fall:.4f}, but should fall by at "
            f"least {LEARNED:g} times {noise}, for a difference to mean anything"
        )
    if judgement.outside:
        outside = " and ".join(judgement.outside)
        return f"OUTSIDE: the mean loss of {outside} differs by more than {noise}"
    inside = " and ".join(row.label for row in judgement.others)
    return f"equal: {inside} within {noise}"


def _ratio(difference: float, noise: float) -> float:
    return abs(difference) / noise if noise else float("inf") if difference else 0.0


def as_json(judgement: Judgement, *, engine: str, seconds: float) -> dict[str, object]:
    """The judgement for a file: unrounded numbers, and where they come from.

    Args:
        judgement: the runs, compared.
        engine: where steps ran.
        seconds: that it took.
    """
    header = judgement.baseline.header
    rows = []
    for row in (judgement.baseline, *judgement.others):
        names = ("mean", "spread", "skipped")
        numbers = {name: getattr(row, name) for name in names}
        rows.append({"dtype": row.label, "held_out": row.losses, **numbers})
        if row is not judgement.baseline:
            rows[-1]["difference"] = judgement.difference(row)
            rows[-1]["reaches"] = judgement.reaches(row)
    return {
        "schema": 1,
        "side": header.side,
        "engine": engine,
        "optimizer": header.optimizer,
        "steps": header.steps,
        "seeds": [run.header.seed for run in judgement.baseline.traces],
        "accumulate": header.accumulate,
        "parameters": header.parameters,
        "text_sha256": header.text_sha256,
        **environment(),
        "threads": header.threads,
        "seconds": round(seconds, 1),
        "noise": judgement.noise,
        "fall": judgement.fall,
        "learned": judgement.learned,
        "reaches": not judgement.outside,
        "rows": rows,
    }
