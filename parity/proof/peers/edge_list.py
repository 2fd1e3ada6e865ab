"""The edges that change training or stored state without a word, run on every side."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from twinstep.parity.proof.peers import edge_engine, edge_ranks, edge_wrappers
from twinstep.parity.proof.peers.edge_scene import Scene, Shown, faults, shown
from twinstep.parity.proof.peers.edge_training import STEPS, Trained, trained
from twinstep.parity.proof.peers.installed import quiet, without_compiler
from twinstep.parity.proof.peers.record import EDGES, recorded_edges

FILE = Path(__file__).with_name("scenes.toml")
PLAYS = {**edge_wrappers.PLAYS, **edge_engine.PLAYS, **edge_ranks.PLAYS}


@cache
def scenes() -> list[Scene]:
    """One for each edge, in the order of what they do to a run; `LOAD` is no edge, but differs."""
    found = []
    for edge, row in tomllib.loads(FILE.read_text()).items():
        upstream, ours = PLAYS[edge]
        found.append(Scene(edge=edge, upstream=upstream, ours=ours, **row))
    return found


def run_all(told: Callable[[str], None] = lambda edge: None) -> tuple[list[Shown], list[Trained]]:
    """Run every scene, then the training runs."""
    seen = []
    for scene in scenes():
        told(scene.edge)
        with quiet():
            seen.append(shown(scene, without_compiler() if scene.compiles else ""))
    with quiet():
        return seen, trained()


def contradictions(seen: Sequence[Shown], runs: Sequence[Trained]) -> list[str]:
    """Disagreements with what is right, with `Compat`, or with the record."""
    by_edge = {scene.edge: scene for scene in scenes()}
    before = {one.edge: one for one in recorded_edges()[0]} if EDGES.exists() else {}
    found = [say for one in seen for say in faults(by_edge[one.edge], one, before.get(one.edge))]
    for run in runs:
        if by_edge[run.edge].field and not run.same:
            found.append(f"{run.edge}: {STEPS} steps with Compat.deepspeed() end elsewhere")
        if not run.visible:
            found.append(f"{run.edge}: {STEPS} steps of ours end where DeepSpeed's do")
    return found
