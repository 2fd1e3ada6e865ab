"""The gate's verdict: on the screen, as JSON, and as annotations of a change on GitHub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from twinstep.benchmarks.beside.statistics import Ratio
from twinstep.benchmarks.regressions.gate import Slower, Verdict
from twinstep.benchmarks.regressions.growth import Growth
from twinstep.benchmarks.regressions.pairs import Plan
from twinstep.parity.report.table import plain_table

Document = dict[str, Any]


def print_verdict(screen: Console, verdict: Verdict, plan: Plan, annotate: bool) -> None:
    """Print everything, the failures last; annotations where a workflow asks for them."""
    if verdict.looks:
        screen.print(times_table(verdict, plan))
        screen.print(verdict.control, highlight=False)
    for label in verdict.unconfirmed:
        screen.print(f"{label}: slower in the first look, not in the second", highlight=False)
    for label, row in verdict.looks.items():
        if row.problem:
            screen.print(f"{label}: not timed, {row.problem}", highlight=False, markup=False)
    counted = sum(len(one["facts"]) for one in verdict.counts.get("candidate", {}).values())
    for reason in dict.fromkeys(verdict.uncounted.values()):
        labels = [label for label, known in verdict.uncounted.items() if known == reason]
        rest = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        screen.print(f"{labels[0]}{rest}: not counted, {reason}", highlight=False, markup=False)
    for failure in verdict.failures:
        screen.print(str(failure), style="bold red", highlight=False, markup=False, soft_wrap=True)
    if annotate:
        for line in workflow_commands(verdict):
            print(line)
        summarise(verdict)
    timed = sum(not row.problem for row in verdict.looks.values())
    done = f"{counted:,} counts and {timed} times compared"
    failed = len(verdict.failures)
    word = "nothing grew" if verdict.compared else "nothing can be compared"
    word = f"{failed} {'cost' if failed == 1 else 'costs'} grew" if failed else word
    screen.print(f"{word}, {done}", style="bold", highlight=False)


def times_table(verdict: Verdict, plan: Plan) -> Table:
    """Candidate over baseline for every row, beside the baseline over itself."""
    table = plain_table(
        f"times: {plan.sets} sets of fresh processes, {plan.rounds} rounds, intervals of 95 %, "
        f"minimum effect {plan.effect:.0%}",
        ("row",),
        ("baseline, ms", "candidate / baseline", "baseline / itself"),
    )
    for label, row in verdict.looks.items():
        if not row.problem:
            ms = f"{1e3 * row.seconds[0]:.4g}"
            table.add_row(label, ms, str(row.ratio()), str(row.control()))
    return table


def workflow_commands(verdict: Verdict) -> Iterator[str]:
    """Workflow commands of GitHub that put a failure at its line."""
    for failure in verdict.failures:
        path, _, line = failure.place.rpartition(":")
        where = f" file={_from_here(path)},line={line}" if path and line.isdigit() else ""
        message = str(failure).replace("%", "%25").replace("\n", "%0A")
        yield f"::error{where or ' '}{',' if where else ''}title=parity bench gate::{message}"


def _from_here(path: str) -> str:
    """A path as seen from the folder of the workflow."""
    real, here = Path(path).resolve(), Path.cwd()
    return str(real.relative_to(here)) if real.is_relative_to(here) else str(real)


def summarise(verdict: Verdict) -> None:
    """Add a summary to the page of the workflow, where there is one."""
    file = os.environ.get("GITHUB_STEP_SUMMARY")
    if not file:
        return
    lines = ["### parity bench gate", ""]
    lines += [f"- **{failure}**" for failure in verdict.failures] or ["Nothing grew.", ""]
    if verdict.looks:
        lines += ["", "| row | candidate / baseline | baseline / itself |", "| --- | --- | --- |"]
        lines += [
            f"| {label} | {row.ratio()} | {row.control()} |"
            for label, row in verdict.looks.items()
            if not row.problem
        ]
        lines += ["", verdict.control]
    with Path(file).open("a") as out:
        out.write("\n".join(lines) + "\n")


def as_document(verdict: Verdict, plan: Plan) -> Document:
    """Everything as figures."""
    return {
        "schema": 1,
        "failures": [described(failure) for failure in verdict.failures],
        "unconfirmed": verdict.unconfirmed,
        "control": {"alarms": verdict.false_alarms, "looks": verdict.controls},
        "plan": {"sets": plan.sets, "rounds": plan.rounds, "effect": plan.effect},
        "times": {
            label: {"ratio": _ends(row.ratio()), "control": _ends(row.control())}
            for label, row in verdict.looks.items()
            if not row.problem
        },
        "counts": verdict.counts,
    }


def described(failure: Growth | Slower) -> dict[str, str]:
    """A failure as a sentence, with its place."""
    return {"sentence": str(failure), "place": failure.place}


def _ends(ratio: Ratio) -> list[float]:
    return [round(x, 4) for x in (ratio.low, ratio.middle, ratio.high)]
