"""The figure of the curves: losses by dtype, distances from one of them, and what was equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinstep.scenarios.pictures import SKIP, figure, frame, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GOOD = "#2e7d32"
LOOKS = ("#333333", "#1f4e8c", "#d07a00", "#2e7d32", "#8e44ad", "#c0392b", "#00838f", "#795548")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (4, 1, 1, 1)), "-")
SHORT = {"reference as DeepSpeed": "made as DeepSpeed"}
Row = Mapping[str, Any]


def draw_curves(found: Row, path: Path) -> None:
    """Draw what `curves.as_json` made; the suffix of the file decides the format.

    Raises:
        PictureImpossible: matplotlib is not installed.
    """
    dtypes = list(dict.fromkeys(row["dtype"] for row in found["runs"]))
    drawn = figure(4.9 * len(dtypes), 11.0)
    panels = drawn.subplots(3, len(dtypes), squeeze=False, height_ratios=[3.2, 3.2, 2.6])
    deepspeed = found["deepspeed"].partition(",")[0]
    drawn.suptitle(
        f"Language model of {found['parameters']:,} parameters, {found['steps']} steps of "
        f"{found['micro_batches']} micro-batches, AdamW. Beside it: {deepspeed}, 1 process.\n"
        "A line is all runs that have the same bits of loss in every step.",
        fontsize=11,
    )
    for dtype, (above, below, words) in zip(dtypes, panels.T, strict=True):
        lines = list(lines_of(found, dtype))
        losses(above, dtype, lines)
        distances(below, lines)
        verdicts(words, [row for row in found["verdicts"] if row["dtype"] == dtype])
    reach = max(abs(value) for axes in panels[1] for value in axes.get_ylim())
    for axes in panels[1]:
        axes.set_ylim(-reach, reach)
    panels[0, 0].set_ylabel("training loss (nats per byte)")
    panels[1, 0].set_ylabel("loss minus that of ZeRO 0, 1 rank")
    drawn.savefig(path, dpi=110)


def lines_of(found: Row, dtype: str) -> Iterator[tuple[str, Sequence[float]]]:
    """Each set of losses of a dtype, and the runs that have it, as words."""
    rows = [row for row in found["runs"] if row["dtype"] == dtype]
    for digest in dict.fromkeys(row["curve"] for row in rows):
        yield (
            "\n".join(labels([row for row in rows if row["curve"] == digest])),
            found["curves"][digest],
        )


def labels(rows: Sequence[Row]) -> Iterator[str]:
    """Runs of one line in words, a line of them for each side or pair of sides."""
    sides: dict[tuple[int, int], list[str]] = {}
    for row in rows:
        sides.setdefault((row["stage"], row["ranks"]), []).append(row["side"])
    groups: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for where, names in sides.items():
        ours = ["both sides"] if {"fast", "reference"} <= {*names} else []
        others = [name for name in names if not ours or name not in ("fast", "reference")]
        for name in (*ours, *others):
            groups.setdefault((SHORT.get(name, name),), []).append(where)
    for (name,), places in groups.items():
        counts: dict[int, list[int]] = {}
        for stage, ranks in places:
            counts.setdefault(stage, []).append(ranks)
        stages: dict[tuple[int, ...], list[int]] = {}
        for stage, several in counts.items():
            stages.setdefault(tuple(several), []).append(stage)
        for both, alike in stages.items():
            yield f"{name}, ZeRO {_listed(alike)}: ranks {_listed(both)}"


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(filter(None, (", ".join(map(str, numbers[:-1])), str(numbers[-1]))))


def losses(axes: Axes, dtype: str, lines: Sequence[tuple[str, Sequence[float]]]) -> None:
    """Each line's running mean; those below are wider, so that one can see all."""
    for place, (label, values) in enumerate(lines):
        steps, width = range(1, len(values) + 1), 1.2 + 0.9 * (len(lines) - 1 - place)
        look = LOOKS[place % len(LOOKS)]
        dash = DASHES[place % len(DASHES)]
        axes.plot(steps, smoothed(values), color=look, lw=width, ls=dash, label=label)
    axes.set_title(dtype, fontsize=12, fontweight="bold")
    axes.legend(frameon=False, fontsize=7, loc="upper right", labelspacing=0.7)
    axes.set_xlabel("step")
    frame(axes)


def distances(axes: Axes, lines: Sequence[tuple[str, Sequence[float]]]) -> None:
    """Each line minus the first, unrounded by any mean."""
    base = lines[0][1]
    for place, (_, values) in enumerate(lines):
        steps = range(1, len(values) + 1)
        away = [value - first for value, first in zip(values, base, strict=True)]
        look, dash = LOOKS[place % len(LOOKS)], DASHES[place % len(DASHES)]
        axes.plot(steps, away, color=look, lw=1.3, ls=dash)
    if len(lines) == 1:
        axes.text(0.5, 0.6, "no run differs", transform=axes.transAxes, ha="center", color=GOOD)
    axes.set_xlabel("step")
    frame(axes)


def verdicts(axes: Axes, rows: Sequence[Row]) -> None:
    """Two runs beside each other, and whether they are equal to the bit; a line each."""
    axes.axis("off")
    for line, row in enumerate(rows):
        height = 1.0 - (line + 0.5) / max(9, len(rows))
        mark, look = ("✗", SKIP) if row["differs"] else ("✓", GOOD)
        sides = f"{row['left']} = {row['right']}".replace("reference as", "reference made as")
        said = f"ZeRO {row['stage']}, ranks {row['ranks']}: {sides}"
        if row["differs"]:
            said = f"{said.replace(' = ', ', ')}: {row['differs'].partition(':')[0]} differs"
        axes.text(0.0, height, mark, color=look, fontsize=11, va="center")
        axes.text(0.06, height, said, fontsize=8, va="center", color="#333333")
