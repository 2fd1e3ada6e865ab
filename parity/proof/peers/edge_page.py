"""The section of docs/reference/peers.md about the ten edges."""

from __future__ import annotations

from collections.abc import Sequence

from twinstep.parity.proof.peers.edge_list import recorded_edges, scenes
from twinstep.parity.proof.peers.edge_scene import Numbers, Scene, Shown, verdict
from twinstep.parity.proof.peers.edge_training import EARLY, STEPS, Trained

HEAD = """
## Ten edges, live

The edges that change training or stored state without a word (docs/reference/edges.md has all of
them), each
as a scene small enough to be checked by hand, run by DeepSpeed and beside it by ours, without and
with `Compat.deepspeed()`: `parity peers --edges`. `make peers` fails when a number moves. Z-3 and
CK-9 are one edge, seen in memory and in a file; the last three rows are not among the ten.

| edge | scene | numbers | right | DeepSpeed | ours | `Compat.deepspeed()` |
| --- | --- | --- | --- | --- | --- | --- |"""
TRAINING = """
Three of them in a training run: a small network, {steps} fp16 steps on every side, mean loss of the
first {early} steps and of the last {early}.

| edge | DeepSpeed | ours | `Compat.deepspeed()` | weights with `Compat.deepspeed()` |
| --- | --- | --- | --- | --- |"""
NOTES = """
Not shown: ours for the rows that say so, since `ZeroOptimizer` is not built yet, and anything on a
GPU. EN-1 has no field of `Compat`: it belongs to the engine, and there is none here."""


def edge_lines() -> list[str]:
    """The section, from the record."""
    seen, runs = recorded_edges()
    by_edge = {one.edge: one for one in seen}
    rows = [_row(scene, by_edge[scene.edge]) for scene in scenes()]
    head = TRAINING.format(steps=STEPS, early=EARLY)
    return [HEAD, *rows, head, *map(_trained, runs), NOTES]


def _row(scene: Scene, seen: Shown) -> str:
    theirs = f"{_listed(seen.upstream)}, {verdict(scene, seen)}" if seen.upstream else "-"
    if seen.missing:
        theirs = verdict(scene, seen)
    ours = scene.lacking or _listed(seen.default)
    field = f" (`{scene.field}`)" if scene.field else ""
    compat = "-" if scene.lacking else f"{_listed(seen.compat)}{field}"
    return (
        f"| {scene.edge} | {scene.setting} | {scene.shows} | {_listed(scene.right)} | {theirs} "
        f"| {ours} | {compat} |"
    )


def _trained(run: Trained) -> str:
    said = "DeepSpeed's, bit for bit" if run.same else "ours: there is no field"
    losses = " | ".join(_losses(side) for side in (run.upstream, run.default, run.compat))
    return f"| {run.edge} | {losses} | {said} |"


def _losses(pair: Numbers) -> str:
    return f"{pair[0]:.3f}, {pair[1]:.3f}"


def _listed(numbers: Sequence[float]) -> str:
    return " ".join(f"{number:g}" for number in numbers) or "-"
