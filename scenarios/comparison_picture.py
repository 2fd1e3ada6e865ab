"""One picture of several runs: what each dtype does, and how far it is from fp32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from twinstep.scenarios.picture import (
    figure,
    frame,
    from_zero,
    powers_of_two,
    running_mean,
    whole_numbers,
)
from twinstep.scenarios.precision import Row, rows_of
from twinstep.scenarios.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"fp32": "#333333", "fp16": "#1f4e8c", "bf16": "#d07a00"}
STYLES = {"fp32": "-", "fp16": "-", "bf16": (0, (4, 1.5))}
BAND = "#d9d9d9"
Curves = Sequence[Sequence[float]]


def draw(traces: Sequence[Trace], path: Path) -> None:
    """Draw runs of any dtypes and seeds into an image file; the suffix decides the format.

    With runs in fp32 among them, two panels more show the distance from these.

    Raises:
        PictureImpossible: matplotlib is not installed.
    """
    rows = rows_of(traces)
    baseline = next((row for row in rows if row.label == "fp32"), None)
    others = [row for row in rows if row is not baseline]
    panels: list[Callable[[Axes], None]] = [lambda axes: draw_loss(axes, rows)]
    if baseline is not None and others and len(baseline.traces) > 1:
        panels += [
            lambda axes: draw_difference(axes, baseline, others),
            lambda axes: draw_norm(axes, rows),
            lambda axes: draw_held_out(axes, baseline, rows),
        ]
    else:
        panels += [lambda axes: draw_norm(axes, rows)]
    panels += [lambda axes: draw_scale(axes, rows), lambda axes: draw_skipped(axes, rows)]
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
    """What was run, in one line."""
    header = rows[0].traces[0].header
    seeds = max(len(row.traces) for row in rows)
    what = {"adam": "AdamW", "lamb": "LAMB"}.get(header.optimizer, header.optimizer)
    return (
        f"{header.scenario}, {what}, {header.side} side: {', '.join(r.label for r in rows)}; "
        f"{seeds} seed{'s' if seeds > 1 else ''}, {header.parameters:,} parameters"
    )


def legend_above(axes: Axes) -> None:
    """A legend in one line above what is drawn, which makes room for it."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.16 * (high - low))
    axes.legend(frameon=False, fontsize=8, loc="upper center", ncols=4, borderaxespad=0.1)


def colour(row: Row) -> str:
    """The colour of a dtype."""
    return COLOURS[row.traces[0].header.dtype]


def smoothed(row: Row) -> Curves:
    """Training loss by seed, a running mean over a twentieth of the run."""
    return [
        running_mean([record.loss for record in trace.records], len(trace.records) // 20)
        for trace in row.traces
    ]


def across(curves: Curves) -> Iterator[tuple[float, ...]]:
    """The values of all seeds, step by step."""
    return zip(*curves, strict=True)


def steps_of(row: Row) -> list[int]:
    """The steps of a row's runs."""
    return [record.step for record in row.traces[0].records]


def draw_loss(axes: Axes, rows: Sequence[Row]) -> None:
    """Training loss: the mean over seeds, and the range of seeds behind it."""
    for row in rows:
        curves, look = smoothed(row), row.traces[0].header.dtype
        mean = [fmean(values) for values in across(curves)]
        low, high = zip(*((min(v), max(v)) for v in across(curves)), strict=True)
        axes.fill_between(steps_of(row), low, high, color=colour(row), alpha=0.12, linewidth=0)
        axes.plot(steps_of(row), mean, color=colour(row), ls=STYLES[look], label=row.label)
    axes.set_title("training loss: mean and range of seeds", loc="left", fontsize=9)
    axes.set_ylabel("nats per byte")
    axes.set_xlabel("step")


def draw_difference(axes: Axes, baseline: Row, others: Sequence[Row]) -> None:
    """Training loss minus fp32's of the same seed, over the spread of fp32's seeds."""
    plain = smoothed(baseline)
    noise = [stdev(values) for values in across(plain)]
    low = [-value for value in noise]
    axes.fill_between(steps_of(baseline), low, noise, color=BAND, label="± 1 sd of fp32's seeds")
    ends = []
    for row in others:
        pairs = zip(smoothed(row), plain, strict=True)
        curves = [[a - b for a, b in zip(ours, fp32, strict=True)] for ours, fp32 in pairs]
        for curve in curves:
            axes.plot(steps_of(row), curve, color=colour(row), linewidth=0.7, alpha=0.35)
        mean = [fmean(values) for values in across(curves)]
        axes.plot(steps_of(row), mean, color=colour(row), label=row.label)
        ends += [abs(value) for value in mean[len(mean) // 4 :] if math.isfinite(value)]
    # The first steps, which fp16 skips, would make everything later a flat line.
    reach = 1.3 * max([*ends, *noise[len(noise) // 4 :]])
    axes.set_ylim(-reach, reach)
    axes.set_title("training loss minus fp32's, same seed", loc="left", fontsize=9)
    axes.set_ylabel("nats per byte")
    axes.set_xlabel("step")


def draw_norm(axes: Axes, rows: Sequence[Row]) -> None:
    """Norm of the unscaled gradients, median of seeds; a step that overflowed has none."""
    medians: list[float] = []
    for row in rows:
        norms = [[record.norm for record in trace.records] for trace in row.traces]
        finite = [[norm for norm in values if math.isfinite(norm)] for values in across(norms)]
        median = [sorted(values)[len(values) // 2] if values else math.nan for values in finite]
        style = STYLES[row.traces[0].header.dtype]
        axes.plot(steps_of(row), median, color=colour(row), ls=style, lw=1.0, label=row.label)
        medians += median
    from_zero(axes, medians)
    axes.set_title("gradient norm before clipping: median of seeds", loc="left", fontsize=9)
    axes.set_ylabel("norm")
    axes.set_xlabel("step")


def draw_held_out(axes: Axes, baseline: Row, rows: Sequence[Row]) -> None:
    """Loss on unseen text after the last step: every seed, their mean, and fp32's noise."""
    low, high = baseline.mean - baseline.spread, baseline.mean + baseline.spread
    axes.axhspan(low, high, color=BAND, label="mean ± 1 sd of fp32's seeds")
    for losses in zip(*(row.losses for row in rows), strict=True):
        axes.plot(range(len(rows)), losses, color="#999999", linewidth=0.7, zorder=1)
    for place, row in enumerate(rows):
        axes.scatter([place] * len(row.losses), row.losses, color=colour(row), s=22, zorder=2)
        axes.hlines(row.mean, place - 0.16, place + 0.16, color=colour(row), linewidth=2.5)
    axes.set_xticks(range(len(rows)), [row.label for row in rows])
    axes.set_xlim(-0.5, len(rows) - 0.5)
    axes.set_title("held-out loss after the last step: seeds and mean", loc="left", fontsize=9)
    axes.set_ylabel("nats per byte")


def draw_scale(axes: Axes, rows: Sequence[Row]) -> None:
    """The loss scale that each step's gradients carried, by seed; without those that have none."""
    scaled = [row for row in rows if any(r.scale != 1.0 for t in row.traces for r in t.records)]
    for row in scaled or rows:
        for index, trace in enumerate(row.traces):
            axes.step(
                steps_of(row),
                [record.scale for record in trace.records],
                where="mid",
                color=colour(row),
                linewidth=1.1,
                alpha=1.0 if index == 0 else 0.5,
            )
    powers_of_two(axes)
    plain = " and ".join(row.label for row in rows if row not in scaled)
    without = f" ({plain}: none)" if plain and scaled else ""
    axes.set_title(f"loss scale: every seed{without}", loc="left", fontsize=9)
    axes.set_ylabel("scale")
    axes.set_xlabel("step")


def draw_skipped(axes: Axes, rows: Sequence[Row]) -> None:
    """Skipped steps so far, by seed."""
    for row in rows:
        for index, trace in enumerate(row.traces):
            taken = [sum(step <= record.step for step in trace.skipped) for record in trace.records]
            alpha, label = (1.0, row.label) if index == 0 else (0.5, "")
            (line,) = axes.step(steps_of(row), taken, where="mid", color=colour(row), lw=1.2)
            line.set(linestyle=STYLES[trace.header.dtype], alpha=alpha, label=label)
    axes.set_ylim(top=max(1.0, axes.get_ylim()[1]))
    whole_numbers(axes.yaxis)
    axes.set_title("skipped steps so far: every seed", loc="left", fontsize=9)
    axes.set_ylabel("steps")
    axes.set_xlabel("step")
