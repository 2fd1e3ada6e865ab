"""Pictures of recorded runs: one run by itself, or several beside fp32's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from twinstep.scenarios.precision import Row, rows_of
from twinstep.scenarios.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
LINE, AVERAGE, SKIP = "#9db7d5", "#1f4e8c", "#c0392b"
COLOURS = {"fp32": "#333333", "fp16": "#1f4e8c", "bf16": "#d07a00"}
STYLES = {"fp32": "-", "fp16": "-", "bf16": (0, (4, 1.5))}
BAND = "#d9d9d9"


class PictureImpossible(RuntimeError):
    """matplotlib, which only pictures need, is not installed."""


def draw(traces: Sequence[Trace], path: Path) -> None:
    """Draw runs of any dtypes and seeds into an image file; the suffix decides the format.

    Raises:
        PictureImpossible: matplotlib is not installed.
    """
    if len(traces) == 1:
        draw_run(traces[0], path)
    else:
        draw_runs(traces, path)


def figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches.

    Raises:
        PictureImpossible: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise PictureImpossible(
            "a picture needs matplotlib, which is not installed: pip install matplotlib, "
            "or leave the picture out"
        ) from missing
    return Figure(figsize=(width, height), layout="constrained")


def frame(axes: Axes) -> None:
    """The house's frame: a light grid below the curves, no box around them."""
    axes.set_axisbelow(True)
    axes.grid(visible=True, color="#e6e6e6", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and of those before it, a twentieth of all together."""
    window = max(1, len(values) // 20)
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def from_zero(axes: Axes, values: Sequence[float]) -> None:
    """An axis from zero on, or a logarithmic one where positive values span more than 30 times."""
    known = [value for value in values if value > 0.0]
    if known and max(known) > 30.0 * min(known):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0.0)


def powers_of_two(axes: Axes) -> None:
    """A logarithmic axis of base 2 with at least an octave to either side of what is drawn."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log", base=2)
    low, high = axes.get_ylim()
    axes.set_ylim(low / 2.0, high * 2.0)
    axes.yaxis.set_major_locator(LogLocator(base=2.0, numticks=9))


def whole_numbers(axis: Axis) -> None:
    """Ticks at whole numbers alone."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def draw_run(trace: Trace, path: Path) -> None:
    """Draw one run: loss, loss scale and gradient norm against the step, skipped steps marked."""
    drawn = figure(8.0, 8.0)
    panels = loss, scale, norm = drawn.subplots(3, 1, sharex=True)
    header, skipped = trace.header, f"{len(trace.skipped)} of {len(trace.records)} steps skipped"
    loss.set_title(
        f"{header.scenario}, {header.side}, {header.optimizer}, {header.dtype}, "
        f"rule {header.rule}, ranks {header.ranks}, seed {header.seed}: {skipped}",
        fontsize=10,
    )
    draw_loss(loss, trace)
    scale.step(trace.column("step"), trace.column("scale"), where="mid", color=AVERAGE)
    powers_of_two(scale)
    scale.set_ylabel("loss scale")
    # A step that overflowed has no norm.
    norms = [value if math.isfinite(value) else math.nan for value in trace.column("norm")]
    norm.plot(trace.column("step"), norms, color=AVERAGE, marker=".", markersize=3, linewidth=1)
    from_zero(norm, norms)
    norm.set_ylabel("gradient norm")
    for axes in panels:
        for index, step in enumerate(trace.skipped):
            label = "skipped step" if index == 0 else None
            axes.axvline(step, color=SKIP, linewidth=0.8, alpha=0.7, label=label, zorder=1)
        frame(axes)
    loss.legend(frameon=False, fontsize=8)
    norm.set_xlabel("step")
    whole_numbers(norm.xaxis)
    drawn.align_ylabels()
    drawn.savefig(path, dpi=130)


def draw_loss(axes: Axes, trace: Trace) -> None:
    """Training loss per step, its running mean, and the held-out loss before and after."""
    steps, values = trace.column("step"), trace.column("loss")
    axes.plot(steps, values, color=LINE, linewidth=1, label="training loss")
    window = len(values) // 20
    if window > 1:
        axes.plot(steps, smoothed(values), color=AVERAGE, label=f"mean of {window} steps")
    ends = [steps[0] - 1, steps[-1]]
    axes.plot(ends, trace.held_out, "D", color="#2e7d32", markersize=5, label="held-out loss")
    axes.set_ylabel("loss (nats per byte)")


def draw_runs(traces: Sequence[Trace], path: Path) -> None:
    """Draw runs of any dtypes and seeds; with fp32 among them, also the distance from it."""
    rows = rows_of(traces)
    baseline = next((row for row in rows if row.label == "fp32"), None)
    others = [row for row in rows if row is not baseline]
    panels: list[Callable[[Axes], None]] = [lambda axes: training_losses(axes, rows)]
    if baseline is not None and others and len(baseline.traces) > 1:
        panels += [
            lambda axes: differences(axes, baseline, others),
            lambda axes: norms(axes, rows),
            lambda axes: held_out_losses(axes, baseline, rows),
        ]
    else:
        panels += [lambda axes: norms(axes, rows)]
    panels += [lambda axes: scales(axes, rows), lambda axes: skipped_steps(axes, rows)]
    drawn = figure(10.0, 2.9 * len(panels) / 2)
    drawn.suptitle(title(rows), fontsize=11)
    for axes, panel in zip(drawn.subplots(len(panels) // 2, 2).flat, panels, strict=True):
        panel(axes)
        frame(axes)
        if axes.get_legend_handles_labels()[0]:
            legend_above(axes)
    drawn.align_ylabels()
    drawn.savefig(path, dpi=110)


def title(rows: Sequence[Row]) -> str:
    """The runs in one line."""
    header = rows[0].header
    seeds = max(len(row.traces) for row in rows)
    optimizer = {"adam": "AdamW", "lamb": "LAMB"}.get(header.optimizer, header.optimizer)
    return (
        f"{header.scenario}, {optimizer}, {header.side} side: {', '.join(r.label for r in rows)}; "
        f"{seeds} seed{'s' if seeds > 1 else ''}, {header.parameters:,} parameters"
    )


def legend_above(axes: Axes) -> None:
    """A legend in one line above what is drawn, which makes room for it."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.16 * (high - low))
    axes.legend(frameon=False, fontsize=8, loc="upper center", ncols=4, borderaxespad=0.1)


def entitle(axes: Axes, what: str, unit: str) -> None:
    """Name a panel and its axis; steps run to the right."""
    axes.set_title(what, loc="left", fontsize=9)
    axes.set_ylabel(unit)
    axes.set_xlabel("step")


def training_losses(axes: Axes, rows: Sequence[Row]) -> None:
    """Training loss: the mean over seeds, and the range of seeds around it."""
    for row in rows:
        seeds = list(zip(*map(smoothed, row.columns("loss")), strict=True))
        low, high = [min(values) for values in seeds], [max(values) for values in seeds]
        look = COLOURS[row.header.dtype]
        axes.fill_between(row.steps, low, high, color=look, alpha=0.12, linewidth=0)
        style = STYLES[row.header.dtype]
        axes.plot(row.steps, list(map(fmean, seeds)), color=look, ls=style, label=row.label)
    entitle(axes, "training loss: mean and range of seeds", "nats per byte")


def differences(axes: Axes, baseline: Row, others: Sequence[Row]) -> None:
    """Training loss minus fp32's of the same seed, over the spread of fp32's seeds."""
    plain = [smoothed(losses) for losses in baseline.columns("loss")]
    noise = [stdev(values) for values in zip(*plain, strict=True)]
    low = [-value for value in noise]
    axes.fill_between(baseline.steps, low, noise, color=BAND, label="± 1 sd of fp32's seeds")
    ends = []
    for row in others:
        look = COLOURS[row.header.dtype]
        pairs = zip(map(smoothed, row.columns("loss")), plain, strict=True)
        curves = [[a - b for a, b in zip(ours, fp32, strict=True)] for ours, fp32 in pairs]
        for curve in curves:
            axes.plot(row.steps, curve, color=look, linewidth=0.7, alpha=0.35)
        mean = [fmean(values) for values in zip(*curves, strict=True)]
        axes.plot(row.steps, mean, color=look, label=row.label)
        ends += [abs(value) for value in mean[len(mean) // 4 :] if math.isfinite(value)]
    # The first steps, which fp16 skips, would make everything later a flat line.
    reach = 1.3 * max([*ends, *noise[len(noise) // 4 :]])
    axes.set_ylim(-reach, reach)
    entitle(axes, "training loss minus fp32's, same seed", "nats per byte")


def norms(axes: Axes, rows: Sequence[Row]) -> None:
    """Norm of the unscaled gradients, median of seeds; a step that overflowed has none."""
    medians: list[float] = []
    for row in rows:
        seeds = zip(*row.columns("norm"), strict=True)
        finite = [[norm for norm in values if math.isfinite(norm)] for values in seeds]
        median = [sorted(values)[len(values) // 2] if values else math.nan for values in finite]
        look, style = COLOURS[row.header.dtype], STYLES[row.header.dtype]
        axes.plot(row.steps, median, color=look, ls=style, lw=1.0, label=row.label)
        medians += median
    from_zero(axes, medians)
    entitle(axes, "gradient norm before clipping: median of seeds", "norm")


def held_out_losses(axes: Axes, baseline: Row, rows: Sequence[Row]) -> None:
    """Loss on unseen text after the last step: every seed, their mean, and fp32's noise."""
    low, high = baseline.mean - baseline.spread, baseline.mean + baseline.spread
    axes.axhspan(low, high, color=BAND, label="mean ± 1 sd of fp32's seeds")
    for losses in zip(*(row.losses for row in rows), strict=True):
        axes.plot(range(len(rows)), losses, color="#999999", linewidth=0.7, zorder=1)
    for place, row in enumerate(rows):
        look = COLOURS[row.header.dtype]
        axes.scatter([place] * len(row.losses), row.losses, color=look, s=22, zorder=2)
        axes.hlines(row.mean, place - 0.16, place + 0.16, color=look, linewidth=2.5)
    entitle(axes, "held-out loss after the last step: seeds and mean", "nats per byte")
    axes.set_xlabel("")
    axes.set_xticks(range(len(rows)), [row.label for row in rows])
    axes.set_xlim(-0.5, len(rows) - 0.5)


def scales(axes: Axes, rows: Sequence[Row]) -> None:
    """The loss scale that each step's gradients carried, by seed; without those that have none."""
    scaled = [row for row in rows if any(set(scale) != {1.0} for scale in row.columns("scale"))]
    for row in scaled or rows:
        look = COLOURS[row.header.dtype]
        for index, scale in enumerate(row.columns("scale")):
            alpha = 1.0 if index == 0 else 0.5
            axes.step(row.steps, scale, where="mid", color=look, linewidth=1.1, alpha=alpha)
    powers_of_two(axes)
    plain = " and ".join(row.label for row in rows if row not in scaled)
    without = f" ({plain}: none)" if plain and scaled else ""
    entitle(axes, f"loss scale: every seed{without}", "scale")


def skipped_steps(axes: Axes, rows: Sequence[Row]) -> None:
    """Skipped steps so far, by seed."""
    for row in rows:
        look, style = COLOURS[row.header.dtype], STYLES[row.header.dtype]
        for index, skipped in enumerate(row.columns("skipped")):
            alpha, label = (1.0, row.label) if index == 0 else (0.5, "")
            taken = list(accumulate(map(int, skipped)))
            (line,) = axes.step(row.steps, taken, where="mid", color=look, lw=1.2)
            line.set(linestyle=style, alpha=alpha, label=label)
    axes.set_ylim(top=max(1.0, axes.get_ylim()[1]))
    whole_numbers(axes.yaxis)
    entitle(axes, "skipped steps so far: every seed", "steps")
