"""The ten edges beside DeepSpeed: the record agrees with what is right, and ours still does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twinstep.contract.compat import Compat
from twinstep.parity.proof.peers.edge_list import PLAYS, contradictions, scenes
from twinstep.parity.proof.peers.edge_scene import Scene, Shown, faults, rounded, verdict
from twinstep.parity.proof.peers.edge_training import of, with_decay, with_growing_scale
from twinstep.parity.proof.peers.edge_wrappers import ours
from twinstep.parity.proof.peers.record import recorded_edges
from twinstep.parity.proof.upstream.edges import edge_ids

# Its own side loads a file that DeepSpeed has to write first.
ALONE = [scene for scene in scenes() if scene.edge != "TF-3"]


def test_the_record_contradicts_nothing() -> None:
    seen, runs = recorded_edges()
    assert [one.edge for one in seen] == [scene.edge for scene in scenes()]
    assert not [one.edge for one in seen if one.missing]
    assert contradictions(seen, runs) == []


def test_every_scene_is_run_and_every_field_is_of_compat() -> None:
    assert set(PLAYS) == {scene.edge for scene in scenes()}
    others = {scene.edge for scene in scenes() if scene.edge.startswith("Z-")} | {"LOAD"}
    assert {scene.edge for scene in scenes()} - others <= set(edge_ids())
    chosen = Compat.deepspeed()
    assert all(getattr(chosen, scene.field) for scene in scenes() if scene.field)


@pytest.mark.parametrize("scene", ALONE, ids=lambda scene: scene.edge)
def test_ours_shows_what_is_on_record(scene: Scene) -> None:
    (before,) = [one for one in recorded_edges()[0] if one.edge == scene.edge]
    assert rounded(scene.ours(Compat())) == before.default == rounded(scene.right)
    assert rounded(scene.ours(Compat.deepspeed())) == before.compat


def test_wrong_numbers_are_told() -> None:
    scene = next(scene for scene in scenes() if scene.edge == "LS-1")
    (before,) = [one for one in recorded_edges()[0] if one.edge == "LS-1"]
    assert faults(scene, before, before) == []
    (said,) = faults(scene, replace(before, default=before.upstream), before)
    assert "right is [1, 1, 1, 1, 1, 1]" in said
    (said,) = faults(scene, replace(before, compat=before.default), before)
    assert "Compat.deepspeed() gives [1.0, 1.0, 1.0" in said
    moved = replace(before, upstream=before.default, compat=before.default)
    (said,) = faults(scene, moved, before)
    assert "on record is [1.0, 1.0, 0.5" in said
    assert verdict(scene, before) == "still so"
    assert verdict(scene, moved) == "no longer so"
    assert verdict(scene, Shown(edge="LS-1", missing="no compiler")) == "not run: no compiler"


@pytest.mark.parametrize("run", [with_growing_scale, with_decay], ids=["LS-1", "FP-1"])
def test_a_training_run_shows_the_edge_and_repeats_itself(run: object) -> None:
    assert callable(run)
    correct, upstream = run(ours(Compat())), run(ours(Compat.deepspeed()))
    row = of("any", upstream, correct, run(ours(Compat.deepspeed())))
    assert row.same
    assert row.visible
    assert not of("any", upstream, upstream, correct).same
    assert not of("any", upstream, upstream, correct).visible
