"""The commands of named scenarios: one for each row of the table, and `list`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from twinstep.parity.registry.engines import require
from twinstep.scenarios import trace as traces
from twinstep.scenarios.calls import SIDES
from twinstep.scenarios.named.drive import run
from twinstep.scenarios.named.laws import laws_of
from twinstep.scenarios.named.picture import Verdict, draw_scenario
from twinstep.scenarios.named.scenario import Outcome, Scenario
from twinstep.scenarios.named.table import TABLE
from twinstep.scenarios.pictures import PictureImpossible
from twinstep.scenarios.plan import DTYPES
from twinstep.scenarios.progress import reporter
from twinstep.scenarios.words import at_least

HELD, BROKEN = 0, 1
FOLDER = Path("parity_scenarios")
LINES = 20  # of progress to a pipe, for a run


def add_named(command: argparse.ArgumentParser, scenario: Scenario) -> None:
    """Options of a named scenario."""
    add, sides = command.add_argument, "one side (default both, which must have the same bits)"
    command.description = scenario.about
    add("--side", choices=(*SIDES, "both"), default="both", help=sides)
    add("--ranks", type=at_least(1), default=scenario.ranks, help="simulated, at first")
    add("--dtype", choices=list(DTYPES), help=f"of {', '.join(scenario.dtypes)}")
    add("--steps", type=at_least(1), help=f"at least {scenario.least}")
    add("--engine", choices=("cpu", "replay"), default="cpu", help="of the fast side")
    out = f"where NAME.png and NAME.jsonl are written (default {FOLDER})"
    add("--out", type=Path, default=FOLDER, metavar="FOLDER", help=out)


def named_command(chosen: argparse.Namespace, screen: Console) -> int:
    """Run a scenario on the sides asked for, hold it to its laws, write trace and picture."""
    scenario = TABLE[chosen.command]
    plan = scenario.plan_of(chosen.dtype, chosen.steps, chosen.ranks)
    sides = SIDES if chosen.side == "both" else (chosen.side,)
    if "fast" in sides:
        require(chosen.engine)
    print(f"{scenario.name}: {scenario.about}")
    found: list[Outcome] = []
    verdicts: list[Verdict] = []
    with reporter(screen, max(1, plan.steps // LINES)) as told:
        for side in sides:
            start = time.perf_counter()
            told.begin(f"{scenario.name} {plan.dtype}, {side}", plan.steps)
            found.append(run(scenario, plan, side, chosen.ranks, chosen.engine, told.step))
            screen.print(f"{side}: {plan.steps} steps, {time.perf_counter() - start:.1f} s")
    for claim, broken in judged(found):
        verdicts.append((claim, broken))
        print(f"BROKEN {claim}: {broken}" if broken else f"holds  {claim}")
    chosen.out.mkdir(parents=True, exist_ok=True)
    file = chosen.out / scenario.name
    traces.write([outcome.trace for outcome in found], file.with_suffix(".jsonl"))
    print(file.with_suffix(".jsonl"))
    try:
        draw_scenario(found[-1], verdicts, file.with_suffix(".png"))
        print(file.with_suffix(".png"))
    except PictureImpossible as missing:
        print(missing)
    return BROKEN if any(broken for _, broken in verdicts) else HELD


def judged(found: list[Outcome]) -> Iterator[Verdict]:
    """Each law's claim, and how a side breaks it; None where all sides keep it."""
    for law in laws_of(found[0]):
        said = [(run.trace.header.side, law.broken(run)) for run in found]
        wrong = [f"{side}, {broken}" for side, broken in said if broken]
        yield law.claim, "; ".join(wrong) or None
    if len(found) == len(SIDES):
        reference, fast = (run.trace for run in found)
        differs = traces.first_difference(fast, reference)
        yield "the fast side has the reference's bits in every step", differs


def listing() -> str:
    """The table as text: name, dtypes, ranks, what happens, and what it must show."""
    lines = [f"{'name':26}{'dtypes':16}{'ranks':>5}  what happens, and what it must show"]
    for row in TABLE.values():
        dtypes = " ".join(row.dtypes)
        lines.append(f"{row.name:26}{dtypes:16}{row.ranks:>5}  {row.about}")
        lines += [f"{'':49}- {law.claim}" for law in row.laws]
    return "\n".join(lines)
