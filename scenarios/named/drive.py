"""Runs of scenarios: over simulated ranks or those of torchrun, from checkpoint to checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from twinstep.parity.registry.engines import engine_named, running
from twinstep.scenarios.calls import CPU, SIDES
from twinstep.scenarios.named.scenario import Outcome, Restart, Scenario, Seen
from twinstep.scenarios.named.trainer import ScenarioTrainer
from twinstep.scenarios.plan import Plan
from twinstep.scenarios.processes import simulate
from twinstep.scenarios.ranks import Ranks
from twinstep.scenarios.trace import StepRecord, Trace
from twinstep.scenarios.train import load_checkpoint, one_thread, save_checkpoint
from twinstep.scenarios.trainers import ALONE

PATIENCE = 300.0
Progress = Callable[[StepRecord], None]


class RankFails(RuntimeError):
    """The end of a rank that a scenario has asked for."""


def run(
    scenario: Scenario,
    plan: Plan,
    side: str,
    ranks: int,
    engine: str = "cpu",
    progress: Progress | None = None,
    joined: Ranks | None = None,
) -> Outcome:
    """Run a scenario on one side, and its twin if it has one.

    Args:
        scenario: what happens.
        plan: what is trained.
        side: "reference" or "fast"; the twin is run on it, too.
        ranks: simulated, at first.
        engine: of the fast side.
        progress: called with every step's record, of steps that are taken again too.
        joined: this process as one of the ranks, of a scenario without restarts; None simulates.
    """
    twin = None
    if scenario.twin is not None:
        other = replace(plan, **scenario.twin)  # type: ignore[arg-type]
        twin = alone(scenario.undisturbed, other, side, ranks, engine, None, joined)[0]
    trace, seen = alone(scenario, plan, side, ranks, engine, progress, joined)
    return Outcome(scenario, plan, trace, seen, twin)


def alone(
    scenario: Scenario,
    plan: Plan,
    side: str,
    ranks: int,
    engine: str,
    progress: Progress | None,
    joined: Ranks | None = None,
) -> tuple[Trace, list[Seen]]:
    """Run a scenario on one side, without its twin: one stretch for each restart, and the last."""
    started, first_side = ranks, side
    records, seen = list[StepRecord](), list[Seen]()
    after: list[Trace] = []

    def stretch(path: Path, resumes: bool, restart: Restart | None, place: Ranks) -> None:
        device = engine_named(engine).device if side == "fast" else CPU
        trainer = ScenarioTrainer(scenario, plan, side, device, place)
        header, taken = trainer.header(first_side), list[StepRecord]()
        if resumes:
            held_out, taken = load_checkpoint(path, trainer, header)
        else:
            held_out = trainer.held_out_loss()
        begun, keeps = len(taken), joined is not None or place.number == 0
        while trainer.step < plan.steps:
            if restart is not None and trainer.step == restart.saved:
                save_checkpoint(path, trainer, header, held_out, taken)
            taken.append(trainer.advance())
            if place.number == 0 and progress is not None:
                progress(taken[-1])
            if restart is not None and trainer.step == restart.step:
                if place.number == 0:
                    seen[begun:] = trainer.seen[: restart.saved - begun]
                if place.number == place.count - 1:
                    raise RankFails(f"rank {place.number} ends in step {trainer.step}")
                place.gather_numbers([0.0])  # the others wait for it
        if keeps:
            seen[begun:] = trainer.seen
            records[:] = taken
        last = trainer.held_out_loss()
        if keeps:
            head = replace(header, ranks=started)
            after.append(Trace(header=head, records=list(records), held_out=(held_out, last)))

    with one_thread(), tempfile.TemporaryDirectory() as folder:
        path, resumes = Path(folder) / "checkpoint.pt", False
        for restart in (*scenario.restarts, None):
            place = running(engine_named(engine)) if side == "fast" else nullcontext()
            with place:
                try:
                    at = partial(stretch, path, resumes, restart)
                    if joined is None and ranks > 1:
                        simulate(ranks, PATIENCE, at)
                    else:
                        at(joined or ALONE)
                except RankFails:
                    assert restart is not None
                    resumes = True
                    ranks = int(started * restart.ranks)
                    if restart.other_side:
                        side = SIDES[1 - SIDES.index(side)]
    return after[0], seen
