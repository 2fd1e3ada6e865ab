"""Pictures: one run at a glance, and the trend of a history."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from twinstep.benchmarks.beside.rows import AGAIN, CEILING, OURS, PEER
from twinstep.benchmarks.beside.subject import Shape
from twinstep.benchmarks.runs.results import CURVES, SHAPES, Document, title
from twinstep.benchmarks.runs.tables import shown, told, versions
from twinstep.scenarios.pictures import figure, frame

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"ours": "#1f4e8c", "peer": "#d07a00", "ceiling": "#777777", "part": "#e0b070"}
EDGES = (0.05, 50.0)  # of the ratios
COLUMN, LINE = 110, 0.16  # lines of a column, and the height of one in inches
TICKS, NAMED = 30, 12  # commits below a trend, and rows named beside it
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
    """Draw the runs of one series: milliseconds of every row over those of its first run.

    Runs are no pairs: the medians of ours and of the peers move together where the machine did,
    and apart where ours did. Our rows that moved furthest are named.

    Raises:
        PictureImpossible: matplotlib is not installed.
    """
    runs = series["runs"]
    sheet = figure(12, 5.5)
    axes = sheet.add_subplot()
    families = [(family, moved(runs, family)) for family in (PEER, OURS)]
    for family, rows in families:
        for line in rows.values():
            axes.plot(*zip(*line, strict=True), color=COLOURS[family], linewidth=0.5, alpha=0.25)
        middle = [
            (at, statistics.median(here))
            for at in range(len(runs))
            if (here := [ratio for line in rows.values() for there, ratio in line if there == at])
        ]
        if not rows:
            continue
        said = f"{family}: median of {len(rows)} rows"
        axes.plot(*zip(*middle, strict=True), "o-", color=COLOURS[family], linewidth=2, label=said)
    axes.tick_params(labelsize=7)
    places = range(0, len(runs), -(-len(runs) // TICKS))
    axes.set_xticks(places)
    labels = [f"{runs[at]['commit']}\n{runs[at]['time'][:10]}" for at in places]
    axes.set_xticklabels(labels, rotation=60, fontsize=7)
    axes.set_ylabel("ms / ms of the first run: above 1 is slower", fontsize=8)
    key = series["key"]
    axes.set_title(f"{key['device']}, torch {key['torch']}: {len(runs)} runs", fontsize=9)
    named = furthest(families[-1][1])
    beside = (1.0, 1.0)
    axes.legend(title=named, bbox_to_anchor=beside, loc="upper left", fontsize=7, title_fontsize=7)
    frame(axes)
    sheet.savefig(path, dpi=130)


def moved(runs: Sequence[Document], family: str) -> dict[str, list[tuple[int, float]]]:
    """Place and milliseconds over those of its first run, of every row of a family."""
    found: dict[str, list[tuple[int, float]]] = {}
    first: dict[str, float] = {}
    for at, run in enumerate(runs):
        for name, point in run["rows"].items():
            if point["family"] == family and f"{AGAIN}: " not in name:
                base = first.setdefault(name, point["ms"])
                found.setdefault(name, []).append((at, point["ms"] / base))
    return found


def furthest(rows: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Rows whose last run is furthest from their first, a line each."""
    last = {name: line[-1][1] for name, line in rows.items()}
    chosen = sorted(last, key=lambda name: -abs(math.log(last[name])))[:NAMED]
    return "\n".join(["last over first, ours:", *(f"{last[name]:.2f}  {name}" for name in chosen)])
