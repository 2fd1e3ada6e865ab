"""One picture of a run: loss, loss scale, gradient norm against the step, skipped steps marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from twinstep.scenarios.trace import StepRecord, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


class PictureImpossible(RuntimeError):
    """matplotlib, which only pictures need, is not installed."""


SUFFIXES = (".png", ".svg", ".pdf")
LINE, AVERAGE, SKIP = "#9db7d5", "#1f4e8c", "#c0392b"


def figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches.

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


def draw(trace: Trace, path: Path) -> None:
    """Draw a trace into an image file; the suffix decides the format.

    Raises:
        PictureImpossible: matplotlib is not installed.
    """
    drawn = figure(8.0, 8.0)
    loss, scale, norm = drawn.subplots(3, 1, sharex=True)
    loss.set_title(title(trace), fontsize=10)
    draw_loss(loss, trace)
    draw_scale(scale, trace.records)
    draw_norm(norm, trace.records)
    for axes in (loss, scale, norm):
        mark_skipped(axes, trace.skipped)
        frame(axes)
    loss.legend(frameon=False, fontsize=8)
    norm.set_xlabel("step")
    whole_numbers(norm.xaxis)
    drawn.align_ylabels()
    drawn.savefig(path, dpi=130)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and of those before it, `window` together."""
    window = max(1, window)
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def title(trace: Trace) -> str:
    """What was run, in one line."""
    header = trace.header
    skipped = f"{len(trace.skipped)} of {len(trace.records)} steps skipped"
    return (
        f"{header.scenario}, {header.side}, {header.optimizer}, {header.dtype}, "
        f"rule {header.rule}, ranks {header.ranks}, seed {header.seed}: {skipped}"
    )


def draw_loss(axes: Axes, trace: Trace) -> None:
    """Training loss per step, its running mean, and the held-out loss before and after."""
    steps = [record.step for record in trace.records]
    values = [record.loss for record in trace.records]
    axes.plot(steps, values, color=LINE, linewidth=1, label="training loss")
    window = max(1, len(values) // 20)
    if window > 1:
        smooth = running_mean(values, window)
        axes.plot(steps, smooth, color=AVERAGE, label=f"mean of {window} steps")
    ends = [steps[0] - 1, steps[-1]]
    axes.plot(ends, trace.held_out, "D", color="#2e7d32", markersize=5, label="held-out loss")
    axes.set_ylabel("loss (nats per byte)")


def draw_scale(axes: Axes, records: Sequence[StepRecord]) -> None:
    """The loss scale that each step's gradients carried."""
    axes.step(
        [record.step for record in records],
        [record.scale for record in records],
        where="mid",
        color=AVERAGE,
    )
    powers_of_two(axes)
    axes.set_ylabel("loss scale")


def draw_norm(axes: Axes, records: Sequence[StepRecord]) -> None:
    """Global norm of the unscaled gradients; a step that overflowed has none."""
    norms = [record.norm if math.isfinite(record.norm) else math.nan for record in records]
    steps = [record.step for record in records]
    axes.plot(steps, norms, color=AVERAGE, marker=".", markersize=3, linewidth=1)
    from_zero(axes, norms)
    axes.set_ylabel("gradient norm")


def mark_skipped(axes: Axes, steps: list[int]) -> None:
    """Draw a thin red line through every skipped step."""
    for index, step in enumerate(steps):
        label = "skipped step" if index == 0 else None
        axes.axvline(step, color=SKIP, linewidth=0.8, alpha=0.7, label=label, zorder=1)


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
