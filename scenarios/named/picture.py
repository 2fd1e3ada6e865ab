"""The picture of a scenario: loss, scale and norm against the step, what happened, what held."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from twinstep.scenarios.named.scenario import Outcome
from twinstep.scenarios.pictures import (
    AVERAGE,
    LINE,
    SKIP,
    figure,
    frame,
    powers_of_two,
    smoothed,
    whole_numbers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EVENT, GOOD, MANY, DOTS = "#d07a00", "#2e7d32", 60, 300
# By the field of the plan in which the other run differs.
TWINS = {"broken": "without masters", "offload": "without offload"}
Verdict = tuple[str, str | None]
Event = tuple[float, float, str]  # first and last step, and a word


def draw_scenario(run: Outcome, verdicts: Sequence[Verdict], path: Path) -> None:
    """Draw a run into an image file; the suffix decides the format.

    Args:
        run: of one side; another side with the same steps looks the same.
        verdicts: each law's claim, and how it is broken or None.
        path: of the image.

    Raises:
        PictureImpossible: matplotlib is not installed.
    """
    kinds = [loss, *([scale] if run.plan.dtype == "fp16" else []), norm]
    if run.plan.cycle or any(change.name == "lr" for change in run.scenario.changes):
        kinds.append(rate)
    drawn = figure(9.0, 1.7 * len(kinds) + 0.2 * len(verdicts) + 1.0)
    ratios = [1.7] * len(kinds) + [0.2 * len(verdicts) + 0.1]
    *panels, words = drawn.subplots(len(kinds) + 1, 1, height_ratios=ratios)
    header = run.trace.header
    drawn.suptitle(
        f"{run.scenario.about}\n{run.scenario.name}: {header.optimizer}, {header.dtype}, "
        f"ranks {header.ranks}, {len(run.trace.skipped)} of {len(run.trace.records)} steps skipped",
        fontsize=10,
    )
    happened = list(events(run))
    for kind, axes in zip(kinds, panels, strict=True):
        kind(axes, run)
        axes.set_xlim(0, len(run.trace.records) + 1)
        for first, last, _ in happened:
            axes.axvspan(first - 0.5, last + 0.5, color=EVENT, alpha=0.22, lw=0, zorder=0)
        frame(axes)
        whole_numbers(axes.xaxis)
    for first, last, what in joined(happened, len(run.trace.records) / 12):
        place = ((first + last) / 2, 1.02)
        where = panels[0].get_xaxis_transform()
        panels[0].text(*place, what, color=EVENT, fontsize=8, ha="center", transform=where)
    panels[-1].set_xlabel("step")
    words.axis("off")
    for line, (claim, broken) in enumerate(verdicts):
        mark, look = ("✗", SKIP) if broken else ("✓", GOOD)
        height = 1.0 - (line + 0.5) / len(verdicts)
        words.text(0.0, height, mark, color=look, fontsize=11, va="center")
        said = f"{claim}: {broken}" if broken else claim
        words.text(
            0.025, height, said, color=look if broken else "#333333", fontsize=8, va="center"
        )
    drawn.align_ylabels(panels)
    drawn.savefig(path, dpi=120)


def events(run: Outcome) -> Iterator[Event]:
    """First and last step of everything that happened, and a word for it."""
    scenario = run.scenario
    for fault in scenario.faults:
        kind = {math.inf: "overflow"}.get(fault.factor, f"gradients × {fault.factor:g}")
        kind = "NaN" if math.isnan(fault.factor) else kind
        # Steps in a row differ from their place by the same number.
        for _, stretch in groupby(enumerate(fault.steps), lambda pair: pair[1] - pair[0]):
            steps = [step for _, step in stretch]
            yield steps[0], steps[-1], kind
    for change in scenario.changes:
        times = "× " if change.name == "lr" else "= "
        yield change.step, change.step, f"{change.name} {times}{change.value:g}"
    for restart in scenario.restarts:
        then = "the other side goes on" if restart.other_side else "rank lost"
        if restart.ranks != 1.0:
            then = f"from here ranks: {restart.ranks * run.trace.header.ranks:g}"
        yield restart.saved + 0.5, restart.step, then
    for frozen in scenario.frozen:
        yield 1, frozen.until - 1, f"{frozen.only} frozen"


def joined(happened: Sequence[Event], near: float) -> list[Event]:
    """Events of one word that are nearer than this as one, so that their words do not overlap."""
    found: list[Event] = []
    for first, last, what in happened:
        if found and found[-1][2] == what and first - found[-1][1] < near:
            found[-1] = (found[-1][0], last, what)
        else:
            found.append((first, last, what))
    return found


def twin_of(run: Outcome) -> str:
    """The other run in a few words."""
    return " and ".join(TWINS[name] for name in run.scenario.twin or ()) or "undisturbed"


def _skips(axes: Axes, run: Outcome) -> None:
    steps = run.trace.skipped
    if len(steps) > MANY:
        axes.plot(steps, [0.03] * len(steps), "|", color=SKIP, transform=axes.get_xaxis_transform())
        return
    for step in steps:
        axes.axvline(step, color=SKIP, linewidth=0.9, alpha=0.7, zorder=1)


def loss(axes: Axes, run: Outcome) -> None:
    """Training loss, its mean, the twin's mean, and the loss on unseen text at both ends."""
    steps, values = run.trace.column("step"), run.trace.column("loss")
    axes.plot(steps, values, color=LINE, linewidth=1, label="training loss")
    mean = "mean" if run.twin is None else "mean, this run"
    axes.plot(steps, smoothed(values), color=AVERAGE, label=mean)
    if run.twin is not None:
        curve = smoothed(run.twin.column("loss"))
        other = f"mean, a run {twin_of(run)}"
        axes.plot(steps, curve, color="black", ls=(0, (2, 3)), lw=1.3, label=other)
    axes.plot(
        [0.5, steps[-1] + 0.5], run.trace.held_out, "D", color=GOOD, ms=4, label="unseen text"
    )
    _skips(axes, run)
    if run.trace.skipped:
        axes.plot([], [], color=SKIP, linewidth=1, label="skipped step")
    axes.legend(edgecolor="none", framealpha=0.9, fontsize=7, loc="best")
    axes.set_ylabel("nats per byte")


def scale(axes: Axes, run: Outcome) -> None:
    """The loss scale that each step's gradients carried."""
    axes.step(run.trace.column("step"), run.trace.column("scale"), where="mid", color=AVERAGE)
    powers_of_two(axes)
    _skips(axes, run)
    axes.set_ylabel("loss scale")


def norm(axes: Axes, run: Outcome) -> None:
    """Gradient norm; a step that overflowed has none."""
    values = [value if math.isfinite(value) else math.nan for value in run.trace.column("norm")]
    known = [value for value in values if value > 0.0]
    # One step between two that overflowed is no line.
    dot = 3 if len(values) <= DOTS else 0
    axes.plot(
        run.trace.column("step"), values, color=AVERAGE, linewidth=1, marker=".", markersize=dot
    )
    if known and max(known) > 30.0 * min(known):
        axes.set_yscale("log")
    _skips(axes, run)
    axes.set_ylabel("gradient norm,\nunclipped")


def rate(axes: Axes, run: Outcome) -> None:
    """Learning rate."""
    axes.plot(run.trace.column("step"), run.trace.column("lr"), color=AVERAGE, linewidth=1)
    axes.set_ylabel("learning rate")
