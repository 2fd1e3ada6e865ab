"""Pictures: one run at a glance, and the trend of a history."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from twinstep.benchmarks.beside.rows import AGAIN, CEILING, OURS
from twinstep.benchmarks.beside.subject import Shape
from twinstep.benchmarks.runs.results import CURVES, SHAPES, Document, title
from twinstep.benchmarks.runs.tables import shown, told, versions
from twinstep.scenarios.pictures import figure, frame

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"ours": "#1f4e8c", "peer": "#d07a00", "ceiling": "#777777", "part": "#e0b070"}
EDGES = (0.05, 50.0)  # of the ratios
COLUMN, LINE = 110, 0.16  # lines of a column, and the height of one in inches
SMALL = 64  # elements of each tensor of the curves over tensors


def draw_run(document: Document, path: Path) -> None:
    """Draw a run into an image file: ratios of all rows, then curves over sizes and tensors.

    Raises:
        PictureImpossible: matplotlib is not installed.
    """
    columns = columns_of(bars_of(document["groups"]))
    curves = [(name, one) for name in CURVES for one in ("sizes", "tensors")]
    curves = [row for row in curves if len(curve(document, *row)) > 1]
    wide, lines = len(columns) + bool(curves), max(map(lines_of, columns), default=0)
    sheet = figure(6.5 * wide, max(4.0, LINE * lines + 1.2))
    grid = sheet.add_gridspec(max(1, len(curves)), wide)
    for number, groups in enumerate(columns):
        ratios(sheet.add_subplot(grid[:, number]), groups, lines)
    for number, (name, kind) in enumerate(curves):
        curve_axes(sheet.add_subplot(grid[number, wide - 1]), document, name, kind)
    key = document["key"]
    made = f"{document['processes']} processes, load before {document['load']}"
    sheet.suptitle(
        f"{key['device']}, torch {key['torch']}, {made}\n{versions(document)}", fontsize=10
    )
    sheet.savefig(path, dpi=130)


def lines_of(groups: Sequence[Document]) -> int:
    """Lines that groups take, their titles included."""
    return sum(len(told(group)) + 1 for group in groups)


def columns_of(groups: Sequence[Document]) -> list[list[Document]]:
    """Groups in columns of about equal length that fit a screen; none is divided."""
    count = max(1, -(-lines_of(groups) // COLUMN))
    columns: list[list[Document]] = [[] for _ in range(count)]
    done, whole = 0, max(1, lines_of(groups))
    for group in groups:
        columns[min(count - 1, done * count // whole)].append(group)
        done += lines_of([group])
    return [column for column in columns if column] or [[]]


def bars_of(groups: Sequence[Document]) -> list[Document]:
    """Groups that are not points of a curve alone."""
    return [
        group
        for group in groups
        if group["operation"] not in CURVES or Shape(group["tensors"], group["each"]) in SHAPES
    ]


def ratios(axes: Axes, groups: Sequence[Document], lines: int) -> None:
    """Time of every row over ours, with its interval, on a logarithmic scale."""
    names, place = [], 0
    for group in groups:
        names.append((place, f"{group['operation']} {group['dtype']} {title(group)}", True))
        for row in told(group):
            place += 1
            low, middle, high = row["times_ours"]
            colour = COLOURS[row["family"]]
            if low is not None:
                axes.plot([low, high], [place, place], color=colour, linewidth=3, alpha=0.4)
            axes.plot([middle], [place], "o" if row["family"] != CEILING else "|", color=colour)
            names.append((place, shown(row), False))
        place += 1
    axes.axvline(1.0, color=COLOURS["ours"], linewidth=1)
    axes.set_xscale("log")
    # Intervals of a busy machine reach far beyond: they are cut, not shown whole.
    axes.set_xlim(*EDGES)
    axes.set_ylim(max(place, lines), -1)
    axes.set_yticks([at for at, _, _ in names])
    labels = axes.set_yticklabels([text for _, text, _ in names], fontsize=6.5)
    for label, (_, _, head) in zip(labels, names, strict=True):
        label.set_fontweight("bold" if head else "normal")
    axes.set_xlabel("time / ours: right of 1 ours is faster; bars: 95 %", fontsize=8)
    frame(axes)


def curve(document: Document, operation: str, kind: str) -> list[Document]:
    """Groups along a curve, of one combination: sizes of one tensor, or numbers of small ones."""
    found = [
        group
        for group in document["groups"]
        if group["operation"] == operation
        and (
            group["tensors"] == 1 and group["each"] > SMALL
            if kind == "sizes"
            else group["each"] == SMALL
        )
    ]
    found = [group for group in found if group["dtype"] == found[0]["dtype"]]
    return sorted(found, key=lambda group: (group["tensors"], group["each"]))


def curve_axes(axes: Axes, document: Document, operation: str, kind: str) -> None:
    """Times along a curve, a line for each row."""
    groups = curve(document, operation, kind)
    lines: dict[str, tuple[str, list[float], list[float]]] = {}
    for group in groups:
        for row in group["rows"]:
            if row["name"].endswith(AGAIN):
                continue
            _, x, y = lines.setdefault(row["name"], (row["family"], [], []))
            x.append(group["each"] if kind == "sizes" else group["tensors"])
            y.append(row["ms"])
    for name, (family, x, y) in lines.items():
        style = {"ours": "-", "peer": "--", "ceiling": ":"}[family]
        axes.plot(
            x,
            y,
            style,
            marker=".",
            label=name,
            color=COLOURS[family] if family != "peer" else None,
            linewidth=2 if family == OURS else 1,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    along = "elements of one tensor" if kind == "sizes" else f"number of tensors of {SMALL}"
    axes.set_title(f"{operation}: ms by {along}", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=6, frameon=False)
    frame(axes)


def draw_trend(series: Document, path: Path) -> None:
    """Draw the runs of one series: milliseconds of every row, relative to its first run.

    Raises:
        PictureImpossible: matplotlib is not installed.
    """
    sheet = figure(9, 5)
    axes = sheet.add_subplot()
    names = list(dict.fromkeys(name for run in series["runs"] for name in run["rows"]))
    for name in names:
        points = [
            (at, run["rows"][name]["ms"])
            for at, run in enumerate(series["runs"])
            if name in run["rows"]
        ]
        first = points[0][1]
        axes.plot(
            [at for at, _ in points],
            [ms / first for _, ms in points],
            marker=".",
            linewidth=1,
            label=name,
        )
    axes.set_xticks(range(len(series["runs"])))
    axes.set_xticklabels([run["commit"] for run in series["runs"]], rotation=60, fontsize=7)
    axes.set_ylabel("ms / ms of the first run")
    axes.set_title(f"{series['key']['device']}, torch {series['key']['torch']}", fontsize=9)
    if len(names) <= 20:
        axes.legend(fontsize=6, frameon=False)
    frame(axes)
    sheet.savefig(path, dpi=130)
