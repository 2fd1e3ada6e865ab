"""A judgement as a table and as JSON."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from twinstep.scenarios import trace
from twinstep.scenarios.precision import LEARNED, Judgement, Row

COLUMNS = ("mean", "spread", "difference", "of the noise", "skipped")


def show(judgement: Judgement, screen: Console) -> None:
    """Print every dtype's held-out losses, and the verdict in words."""
    baseline = judgement.baseline
    title = (
        f"held-out loss, nats per byte, after {baseline.traces[0].header.steps} steps; "
        "spread is the sample standard deviation over seeds"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("dtype", no_wrap=True)
    for run in baseline.traces:
        table.add_column(f"seed {run.header.seed}", justify="right")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    table.add_column("verdict", no_wrap=True)
    table.add_row(*_cells(baseline), "", "", _skipped(baseline), "baseline")
    for verdict in judgement.verdicts:
        table.add_row(
            *_cells(verdict.row),
            f"{verdict.difference:+.4f}",
            f"{_ratio(verdict.difference, verdict.noise):.2f}",
            _skipped(verdict.row),
            "reaches fp32" if verdict.reaches else "OUTSIDE the noise",
        )
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
    outside = [verdict.row.label for verdict in judgement.verdicts if not verdict.reaches]
    if outside:
        return f"OUTSIDE: the mean loss of {' and '.join(outside)} differs by more than {noise}"
    inside = " and ".join(verdict.row.label for verdict in judgement.verdicts)
    return f"equal: {inside} within {noise}"


def _cells(row: Row) -> list[str]:
    losses = [f"{loss:.4f}" for loss in row.losses]
    return [row.label, *losses, f"{row.mean:.4f}", f"{row.spread:.4f}"]


def _skipped(row: Row) -> str:
    return " ".join(map(str, row.skipped))


def _ratio(difference: float, noise: float) -> float:
    return abs(difference) / noise if noise else float("inf") if difference else 0.0


def as_json(judgement: Judgement, *, engine: str, seconds: float) -> dict[str, object]:
    """The judgement for a file: numbers as they are, and where they come from.

    Args:
        judgement: what was found.
        engine: where steps ran.
        seconds: that it took.
    """
    header = judgement.baseline.traces[0].header
    rows = [_row_json(judgement.baseline)]
    for verdict in judgement.verdicts:
        says = {"difference": verdict.difference, "reaches": verdict.reaches}
        rows.append({**_row_json(verdict.row), **says})
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
        **trace.environment(),
        "threads": header.threads,
        "seconds": round(seconds, 1),
        "noise": judgement.noise,
        "fall": judgement.fall,
        "learned": judgement.learned,
        "reaches": judgement.reaches,
        "rows": rows,
    }


def _row_json(row: Row) -> dict[str, object]:
    return {
        "dtype": row.label,
        "held_out": row.losses,
        "mean": row.mean,
        "spread": row.spread,
        "skipped": row.skipped,
    }
