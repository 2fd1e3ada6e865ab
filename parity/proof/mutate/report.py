"""The score on the screen and as JSON."""

from __future__ import annotations

import json
import platform
from collections import Counter

import torch
import triton
from rich.console import Console
from rich.table import Table

from twinstep.parity.proof.mutate.score import Score
from twinstep.parity.proof.mutate.verdict import End, Kind

SCHEMA = "parity-mutate/1"


def machine(jobs: int) -> str:
    """The machine that the numbers were measured on."""
    python = platform.python_version()
    versions = f"Python {python}, torch {torch.__version__}, triton {triton.__version__}"
    return f"{jobs} process{'' if jobs == 1 else 'es'}, {versions}"


def print_score(screen: Console, score: Score, seconds: float, profile: str, jobs: int) -> None:
    """Laws, survivors, score and what closes the gate."""
    if score.of(Kind.WRONG):
        screen.print(by_law(score))
    if score.of(Kind.PLANTED):
        screen.print(by_rule(score))
    for verdict in score.of(Kind.PLANTED, End.SURVIVED):
        screen.print(f"survives: {verdict.says}", highlight=False, markup=False)
        screen.print(f"  {verdict.reason or 'no reason is known'}", highlight=False, markup=False)
    for verdict in score.of(Kind.WRONG, End.WAITS):
        said = f"waits: {verdict.subject.name} {verdict.reason}"
        screen.print(said, highlight=False, markup=False)
    for line in totals(score):
        screen.print(line, style="bold", highlight=False)
    screen.print(
        f"profile {profile}, {seconds:.0f} s on {machine(jobs)}", highlight=False, soft_wrap=True
    )
    for problem in score.problems():
        screen.print(f"gate: {problem}", style="red", highlight=False, markup=False)


def totals(score: Score) -> list[str]:
    """The score in a few lines."""
    lines = []
    for kind in (Kind.WRONG, Kind.PLANTED):
        planted = score.planted(kind)
        if score.of(kind):
            killed = sum(v.end is End.KILLED for v in planted)
            left = Counter(v.end.value for v in score.of(kind) if v not in planted)
            rest = "".join(f", {number} {end}" for end, number in sorted(left.items()))
            lines.append(f"{kind.value}s: {killed} killed of {len(planted)} planted{rest}")
    harmless = score.judged()
    if score.of(Kind.HARMLESS):
        alarms = sum(v.end is End.REJECTED for v in harmless)
        absent = len(score.of(Kind.HARMLESS)) - len(harmless)
        rest = f", {absent} cannot run here" if absent else ""
        lines.append(f"harmless variants: {alarms} false alarms of {len(harmless)}{rest}")
    return lines


def by_law(score: Score) -> Table:
    """Wrong kernels and classes that each law kills, and those that no other law kills."""
    table = Table(title="wrong kernels and classes killed")
    table.add_column("law")
    for heading in ("all", "by this law alone"):
        table.add_column(heading, justify="right")
    killed = Counter(law for v in score.of(Kind.WRONG) for law in v.killed_by)
    lone = score.lone()
    for law in score.laws():
        table.add_row(law, str(killed[law]), str(len(lone[law])))
    return table


def by_rule(score: Score) -> Table:
    """Ends of the faults planted in our own source, by rule."""
    ends = [End.KILLED, End.SURVIVED, End.SAME_CODE, End.STILLBORN]
    table = Table(title="faults planted in fast/kernels")
    table.add_column("rule")
    for end in ends:
        table.add_column(end.value, justify="right")
    rows: dict[str, Counter[End]] = {}
    for verdict in score.of(Kind.PLANTED):
        rule = verdict.says.split(", ")[1].partition(":")[0]
        rows.setdefault(rule, Counter())[verdict.end] += 1
    for rule, found in sorted(rows.items()):
        table.add_row(rule, *(str(found[end] or "") for end in ends))
    return table


def as_json(score: Score, seconds: float, profile: str, jobs: int) -> str:
    """Everything, for other programs."""
    planted = {kind: score.planted(kind) for kind in (Kind.WRONG, Kind.PLANTED)}
    data = {
        "schema": SCHEMA,
        "machine": machine(jobs),
        "profile": profile,
        "seconds": round(seconds, 1),
        "complete": score.complete,
        "score": {
            **{
                kind.value: {
                    "planted": len(rows),
                    "killed": sum(v.end is End.KILLED for v in rows),
                }
                for kind, rows in planted.items()
            },
            Kind.HARMLESS.value: {
                "judged": len(score.judged()),
                "false alarms": len(score.of(Kind.HARMLESS, End.REJECTED)),
            },
        },
        "alone": score.lone(),
        "problems": score.problems(),
        "verdicts": [verdict.record() for verdict in score.verdicts],
    }
    return json.dumps(data, indent=1) + "\n"
