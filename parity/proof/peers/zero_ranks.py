"""Ranks of the runs with ZeRO: each world of real processes is started once, and runs them all.

`python -m twinstep.parity.proof.peers.zero_ranks WORLD RANK FOLDER SEEDS STEPS` is one rank; it
leaves what it has seen in a file of the folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import twinstep.replay
from twinstep.contract.compat import Compat
from twinstep.parity.proof.peers.installed import deepspeed, free_port
from twinstep.parity.proof.peers.live import disagreement, visible
from twinstep.parity.proof.peers.wire import Wire
from twinstep.parity.proof.peers.zero_config import ZeroConfig, drawn
from twinstep.parity.proof.peers.zero_ledger import without_differences
from twinstep.parity.proof.peers.zero_run import CLASSES, ours, run, theirs
from twinstep.parity.proof.peers.zero_volume import Volume, measured

Row = dict[str, Any]
WORLDS = (1, 2)
SECONDS = 900


@dataclass
class Judged:
    """One configuration on one rank.

    Attributes:
        seed: of it.
        steps: taken by DeepSpeed.
        skipped: of them.
        worst_norm: largest relative distance of two norms, over its bound.
        worst_weight: largest distance of two masters of clipped runs, over its bound.
        wrong: by side, what disagrees.
        default_differs: our default does not what `Compat.deepspeed()` does.
        sibling: the same without the options that bring known differences; None where there are
            none.
    """

    seed: int
    steps: int = 0
    skipped: int = 0
    worst_norm: float = 0.0
    worst_weight: float = 0.0
    wrong: dict[str, list[str]] = field(default_factory=dict)
    default_differs: bool = False
    sibling: Judged | None = None


def judged(config: ZeroConfig) -> Judged:
    """Run a configuration through DeepSpeed and both of our sides."""
    found = Judged(config.seed)
    their_run = run(config, theirs)
    found.steps = len(their_run)
    found.skipped = sum(one.skipped for one in their_run)
    for side in CLASSES:
        our_run = run(config, partial(ours, side=side, compat=Compat.deepspeed()))
        # A norm of each tensor and each group, their squares, and a division by the scale.
        norm, weight, wrong = disagreement(config, their_run, our_run, 2 * config.tensors + 4)
        found.worst_norm = max(found.worst_norm, norm)
        found.worst_weight = max(found.worst_weight, weight)
        found.wrong[side] = wrong
    default = run(config, partial(ours, side="reference", compat=Compat()))
    found.default_differs = bool(visible(our_run, default))
    plain = without_differences(config)
    found.sibling = None if plain is None else judged(plain)
    return found


def _read(row: dict[str, Any]) -> Judged:
    sibling = row["sibling"]
    return Judged(**{**row, "sibling": None if sibling is None else _read(sibling)})


def on_ranks(seeds: Sequence[int], steps: int) -> tuple[list[list[Judged]], list[Volume]]:
    """By world and rank, every configuration; and bytes of a step on two ranks.

    Raises:
        RuntimeError: a rank failed or did not end.
    """
    found: list[list[Judged]] = []
    volumes: list[Volume] = []
    for world in WORLDS:
        chosen = [seed for seed in seeds if drawn(seed, steps).world == world]
        for data in _on_world(world, chosen, steps):
            found.append([_read(row) for row in data["judged"]])
            volumes = [Volume(**row) for row in data["volumes"]] or volumes
    return found, volumes


def _on_world(world: int, seeds: Sequence[int], steps: int) -> list[Mapping[str, list[Row]]]:
    """Files of all ranks; a rank that fails ends the others, which would wait for it."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "twinstep.parity.proof.peers.zero_ranks", str(world)]
        rest = [scratch, ",".join(map(str, seeds)), str(steps)]
        said = [Path(scratch, f"{number}.txt") for number in range(world)]
        ranks = []
        for number, file in enumerate(said):
            with open(file, "w") as errors:
                own = {"RANK": str(number), "LOCAL_RANK": str(number)}
                ranks.append(
                    subprocess.Popen(
                        [*command, str(number), *rest],
                        env={**os.environ, **where, **own},
                        stdout=subprocess.DEVNULL,
                        stderr=errors,
                    )
                )
        try:
            end = time.monotonic() + SECONDS
            while None in (codes := [rank.poll() for rank in ranks]):
                if any(codes) or time.monotonic() > end:
                    break
                time.sleep(0.05)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        for number, code in enumerate(codes):
            if code:
                last = said[number].read_text()[-2000:]
                raise RuntimeError(f"rank {number} of {world} failed: {last}")
        if None in codes:
            raise RuntimeError(f"ranks of {world} did not end within {SECONDS} s")
        return [json.loads(Path(scratch, f"{number}.json").read_text()) for number in range(world)]


def main(arguments: list[str]) -> int:
    """One rank."""
    world, rank, folder, seeds, steps = arguments
    torch.set_num_threads(1)
    wire = Wire()
    wire.install()
    deepspeed("deepspeed")
    twinstep.replay.activate()
    data = {
        "judged": [asdict(judged(drawn(int(seed), int(steps)))) for seed in seeds.split(",")],
        "volumes": [asdict(row) for row in measured(wire)] if world == "2" else [],
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(data))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
