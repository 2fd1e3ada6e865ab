"""Do fp16 and bf16 train as well as fp32, within the noise of seeds?

For every seed all dtypes begin with the same weights and read the same windows. With L(x, s) the
loss on unseen text after the last step of seed s in dtype x:

    noise      = sample standard deviation of L(fp32, s) over seeds (n - 1 in the denominator)
    difference = mean over seeds of L(x, s) - L(fp32, s)
    x reaches fp32 if |difference| <= noise

The noise is fp32's alone, so a dtype that scatters widely cannot hide in its own scatter, and a
loss that is not a number is never within it. A judgement needs runs that learned: the mean fall of
fp32's loss has to be at least `LEARNED` times the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from twinstep.scenarios.model import Shape
from twinstep.scenarios.plan import BROKEN, Plan
from twinstep.scenarios.trace import Trace

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
class Verdict:
    """One dtype against fp32.

    Attributes:
        row: its runs.
        difference: mean over seeds of its loss minus fp32's.
        noise: spread of fp32's losses.
    """

    row: Row
    difference: float
    noise: float

    @property
    def reaches(self) -> bool:
        """Whether the difference is within the noise; a NaN is not."""
        return abs(self.difference) <= self.noise


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What was found.

    Attributes:
        baseline: the fp32 runs.
        verdicts: of the other dtypes, in the order in which they were run.
    """

    baseline: Row
    verdicts: Sequence[Verdict]

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
        """Whether fp32 learned enough for a difference to mean anything."""
        return self.fall >= LEARNED * self.noise

    @property
    def reaches(self) -> bool:
        """Whether every dtype reaches fp32."""
        return all(verdict.reaches for verdict in self.verdicts)


class TracesUnfit(ValueError):
    """These runs cannot be judged against each other."""


def plans(
    *,
    optimizer: str = "adam",
    steps: int = STEPS,
    seeds: int = SEEDS,
    accumulate: int = 1,
    broken: str = "none",
    shape: Shape | None = None,
) -> list[Plan]:
    """The runs of a judgement: every seed in fp32, then in fp16, then in bf16.

    Args:
        optimizer: "adam" or "lamb".
        steps: of every run.
        seeds: 0, 1, ...
        accumulate: micro-batches for each step.
        broken: run fp32 and this instead of fp16 and bf16; it should not reach fp32.
        shape: sizes of the model; None takes `SHAPE`.
    """
    others = (
        [("fp16", "none"), ("bf16", "none")] if broken == "none" else [(BROKEN[broken], broken)]
    )
    return [
        Plan(
            optimizer=optimizer,
            dtype=dtype,
            steps=steps,
            seed=seed,
            accumulate=accumulate,
            rule="wrapper",
            scale_window=WINDOW,
            held_out=HELD_OUT,
            broken=fault,
            shape=SHAPE if shape is None else shape,
        )
        for dtype, fault in [("fp32", "none"), *others]
        for seed in range(seeds)
    ]


def label_of(dtype: str, broken: str) -> str:
    """What a row is called."""
    return dtype if broken == "none" else f"{dtype}, {broken}"


def rows_of(traces: Sequence[Trace]) -> list[Row]:
    """Runs by dtype and fault, in the order in which they come."""
    found: dict[str, list[Trace]] = {}
    for trace in traces:
        label = label_of(trace.header.dtype, trace.header.broken)
        found.setdefault(label, []).append(trace)
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
    noise = baseline.spread
    verdicts = [Verdict(row=r, difference=r.mean - baseline.mean, noise=noise) for r in others]
    return Judgement(baseline=baseline, verdicts=verdicts)


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
    if taken != {baseline.traces[0].header.steps}:
        raise TracesUnfit(f"runs have {sorted(taken)} steps, but should have all of their plan's")
