"""The edges that change training or stored state without a word, run on every side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twinstep.parity.proof.peers import edge_engine, edge_ranks, edge_wrappers
from twinstep.parity.proof.peers.edge_scene import Scene, Shown, faults, shown
from twinstep.parity.proof.peers.edge_training import STEPS, Trained, trained
from twinstep.parity.proof.peers.installed import quiet, without_compiler
from twinstep.parity.proof.peers.record import EDGES, recorded_edges

TEN = ("LS-1", "Z-1", "EN-1", "FP-1", "FA-1", "Z-3", "CK-9", "Z-7", "NM-10", "TF-3", "NM-1")
MORE = ("FA-6", "BF-9", "LOAD")  # the last is no edge, but differs
ORDER = (*TEN, *MORE)


def scenes() -> list[Scene]:
    """One for each edge, in the order of what they do to a run."""
    every = (*edge_wrappers.SCENES, *edge_engine.SCENES, *edge_ranks.SCENES)
    return sorted(every, key=lambda scene: ORDER.index(scene.edge))


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
    """What does not agree with what is right, with `Compat`, or with the record."""
    by_edge = {scene.edge: scene for scene in scenes()}
    before = {one.edge: one for one in recorded_edges()[0]} if EDGES.exists() else {}
    found = [say for one in seen for say in faults(by_edge[one.edge], one, before.get(one.edge))]
    for run in runs:
        if by_edge[run.edge].field and not run.same:
            found.append(f"{run.edge}: {STEPS} steps with Compat.deepspeed() end elsewhere")
        if not run.visible:
            found.append(f"{run.edge}: {STEPS} steps of ours end where DeepSpeed's do")
    return found
