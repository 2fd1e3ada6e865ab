"""The commands of named scenarios: one for each row of the table, and `list`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from twinstep.parity.records.errors import UsageError
from twinstep.parity.registry.engines import require
from twinstep.scenarios import trace as traces
from twinstep.scenarios.calls import SIDES
from twinstep.scenarios.named.drive import PATIENCE, run
from twinstep.scenarios.named.laws import laws_of
from twinstep.scenarios.named.picture import Verdict, draw_scenario
from twinstep.scenarios.named.scenario import Outcome, Scenario
from twinstep.scenarios.named.table import TABLE
from twinstep.scenarios.pictures import PictureImpossible
from twinstep.scenarios.plan import DTYPES, Plan
from twinstep.scenarios.processes import joined, started_by_torchrun
from twinstep.scenarios.progress import reporter
from twinstep.scenarios.ranks import Ranks
from twinstep.scenarios.words import at_least

HELD, BROKEN = 0, 1
FOLDER = Path("parity_scenarios")
LINES = 20  # of progress to a pipe, for a run


def add_named(command: argparse.ArgumentParser, scenario: Scenario) -> None:
    """Options of a named scenario."""
    add, sides = command.add_argument, "one side (default both, which must have the same bits)"
    command.description = scenario.about
    add("--side", choices=(*SIDES, "both"), default="both", help=sides)
    shared = f"simulated, or those of torchrun, at first (default {scenario.ranks}, or all)"
    add("--ranks", type=at_least(1), help=shared)
    add("--dtype", choices=list(DTYPES), help=f"of {', '.join(scenario.dtypes)}")
    add("--steps", type=at_least(1), help=f"at least {scenario.least}")
    add("--engine", choices=("cpu", "replay"), default="cpu", help="of the fast side")
    out = f"where NAME.png and NAME.jsonl are written (default {FOLDER})"
    add("--out", type=Path, default=FOLDER, metavar="FOLDER", help=out)


def named_command(chosen: argparse.Namespace, screen: Console) -> int:
    """Run a scenario on the sides asked for, hold it to its laws, write trace and picture.

    Under torchrun every process is a rank; rank 0 prints, judges and writes.
    """
    scenario, started = TABLE[chosen.command], started_by_torchrun()
    if started and scenario.restarts:
        raise UsageError(f"{scenario.name} ends ranks and starts others: run it without torchrun")
    if started not in (0, chosen.ranks or started):
        raise UsageError(f"ranks={chosen.ranks}, but torchrun has started {started} [--ranks]")
    ranks = chosen.ranks or started or scenario.ranks
    plan = scenario.plan_of(chosen.dtype, chosen.steps, ranks)
    if "fast" in sides_of(chosen):
        require(chosen.engine)
    if not started:
        found = run_sides(chosen, scenario, plan, ranks, screen)
        return report(chosen, scenario, found)
    # By gloo, also on a machine with GPUs: named scenarios run on the CPU.
    with joined("reference", PATIENCE) as rank:
        found = run_sides(chosen, scenario, plan, ranks, screen, rank)
        return report(chosen, scenario, found) if rank.number == 0 else HELD


def sides_of(chosen: argparse.Namespace) -> tuple[str, ...]:
    """The sides that run, in order."""
    return SIDES if chosen.side == "both" else (chosen.side,)


def run_sides(
    chosen: argparse.Namespace,
    scenario: Scenario,
    plan: Plan,
    ranks: int,
    screen: Console,
    rank: Ranks | None = None,
) -> list[Outcome]:
    """Run each side, and show its steps; on all ranks, or on this one of torchrun's."""
    print(f"{scenario.name}: {scenario.about}")
    if rank is not None:
        print(f"ranks: {rank.count} processes, by gloo")
    found: list[Outcome] = []
    with reporter(screen, max(1, plan.steps // LINES)) as told:
        for side in sides_of(chosen):
            start = time.perf_counter()
            told.begin(f"{scenario.name} {plan.dtype}, {side}", plan.steps)
            found.append(run(scenario, plan, side, ranks, chosen.engine, told.step, rank))
            screen.print(f"{side}: {plan.steps} steps, {time.perf_counter() - start:.1f} s")
    return found


def report(chosen: argparse.Namespace, scenario: Scenario, found: list[Outcome]) -> int:
    """Print what held, write trace and picture; the exit code."""
    verdicts: list[Verdict] = []
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
