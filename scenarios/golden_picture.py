"""The picture of a golden trace: scale, norm and first weight against the step, skips marked."""

from __future__ import annotations

from pathlib import Path

from twinstep.golden.show import MEANING
from twinstep.golden.trace import Trace
from twinstep.scenarios.pictures import AVERAGE, SKIP, figure, frame, powers_of_two, whole_numbers

PANELS = {"scale": "loss scale", "norm": "gradient norm", "weights": "first weight"}


def draw_golden(trace: Trace, path: Path) -> None:
    """Draw a trace into an image file; the suffix decides the format.

    Raises:
        PictureImpossible: matplotlib is not installed.
    """
    names = [name for name in PANELS if trace.steps and name in trace.steps[0]]
    drawn = figure(7.0, 1.0 + 1.8 * len(names))
    panels = drawn.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    header, steps = trace.header, range(len(trace.steps))
    skips = [at for at, row in enumerate(trace.steps) if row.get("skipped") or row.get("raised")]
    panels[0].set_title(
        f"{header.name}\n{header.subject}, {header.package} {header.version}", fontsize=9
    )
    for name, axes in zip(names, panels, strict=True):
        values = []
        for at, row in enumerate(trace.steps):
            value = row[name]
            first = value[0] if isinstance(value, tuple) else float(value)
            # A skipped step has no norm.
            values.append(float("nan") if name == "norm" and at in skips else first)
        axes.step(steps, values, where="mid", color=AVERAGE, marker=".", markersize=5)
        if name == "scale" and min(values) > 0.0:
            powers_of_two(axes)
        for at in skips:
            label = "skipped step" if at == skips[0] else None
            axes.axvline(at, color=SKIP, linewidth=0.9, alpha=0.7, label=label, zorder=1)
        axes.set_ylabel(PANELS[name])
        frame(axes)
    if skips:
        panels[0].legend(loc="upper right", fontsize=8)
    panels[-1].set_xlabel("step")
    if len(header.steps) > 24:
        whole_numbers(panels[-1].xaxis)
    else:
        words = [f"{at}: {MEANING.get(letter, letter)}" for at, letter in enumerate(header.steps)]
        panels[-1].set_xticks(list(steps), words, rotation=40, ha="right", fontsize=8)
        panels[-1].set_xlabel("step, and its gradient")
    drawn.align_ylabels(panels)
    drawn.savefig(path, dpi=130)
