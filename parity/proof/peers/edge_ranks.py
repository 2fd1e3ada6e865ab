"""Edges that two ranks show, each in a process of its own: Z-1, Z-3, CK-9.

`python -m twinstep.parity.proof.peers.edge_ranks SCENE RANK PORT FOLDER` is one rank; it leaves
its numbers in a
file of the folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from twinstep.contract.compat import Compat
from twinstep.parity.proof.peers.edge_engine import UNIVERSAL_INFO, Sums, convert, engine
from twinstep.parity.proof.peers.edge_scene import Numbers, Play
from twinstep.parity.proof.peers.installed import deepspeed, free_port
from twinstep.parity.ranks.world import Rank, World
from twinstep.reference.optimizers.zero import ZeroOptimizer

WORLD = 2
SIZES = (4, 3, 5)
SECONDS = 300


def summed(rank: int, folder: Path) -> Numbers:
    """Movement of the first element of each weight in a step; gradients are 1 and 3."""
    del folder
    model = Sums(SIZES)
    config = {
        "fp16": {"enabled": True, "loss_scale": 1},
        "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    whole = engine(model, torch.optim.SGD(model.parameters(), lr=1.0), config)
    whole.backward(whole((1.0, 3.0)[rank], len(SIZES)))
    whole.step()
    return [place + 1.0 - weight[0].item() for place, weight in enumerate(model.weights)]


ROUND_ROBIN = {
    "fp16": {"enabled": True, "loss_scale": 1},
    "zero_optimization": {"stage": 2, "round_robin_gradients": True},
}


def viewed(rank: int, folder: Path) -> Numbers:
    """The first element of each fp32 weight, as DeepSpeed shows it; they are 1, 2 and 3."""
    del rank, folder
    model = Sums(SIZES)
    engine(model, torch.optim.SGD(model.parameters(), lr=1.0), ROUND_ROBIN)
    view = deepspeed("deepspeed.utils").safe_get_full_fp32_param
    return [float(view(weight)[0]) for weight in model.weights]


def converted(rank: int, folder: Path) -> Numbers:
    """The first element of each weight in a universal checkpoint; they are 1, 2 and 3."""
    model = Sums(SIZES)
    whole = engine(model, torch.optim.AdamW(model.parameters(), lr=0.0), ROUND_ROBIN)
    whole.backward(whole(1.0, len(SIZES)))
    whole.step()
    whole.save_checkpoint(str(folder), tag="t", client_state=UNIVERSAL_INFO)
    torch.distributed.barrier()
    if rank:
        return []
    convert(folder / "t", folder / "u")
    files = [folder / "u" / "zero" / f"weights.{at}" / "fp32.pt" for at in range(len(SIZES))]
    loaded = [torch.load(file, weights_only=False) for file in files]
    return [float(held["param"].flatten()[0]) for held in loaded]


RUNS: dict[str, Callable[[int, Path], Numbers]] = {
    "summed": summed,
    "viewed": viewed,
    "converted": converted,
}


def sharded(
    rank: Rank, inside: Callable[..., torch.optim.Optimizer], **options: object
) -> tuple[Sums, ZeroOptimizer]:
    """The same weights around the reference, on one of two simulated ranks."""
    model = Sums(SIZES)
    names = {weight: name for name, weight in model.named_parameters()}
    group = rank.group("data")
    make: Callable[..., ZeroOptimizer] = ZeroOptimizer
    rate = inside(model.parameters())
    return model, make(rate, param_names=names, dp_process_group=group, verbose=False, **options)


def our_sums(compat: Compat) -> Numbers:
    """Movement of the first element of each weight in a step of the reference."""

    def run(rank: Rank) -> Numbers:
        sgd = partial(torch.optim.SGD, lr=1.0)
        model, optimizer = sharded(rank, sgd, partition_grads=False, compat=compat)
        optimizer.backward(model((1.0, 3.0)[rank.number], len(SIZES)))
        optimizer.step()
        return [place + 1.0 - weight[0].item() for place, weight in enumerate(model.weights)]

    return World(WORLD).run(run)[0]


def our_view(compat: Compat) -> Numbers:
    """The first element of each fp32 weight, as the reference shows it."""

    def run(rank: Rank) -> Numbers:
        sgd = partial(torch.optim.SGD, lr=1.0)
        model, optimizer = sharded(rank, sgd, round_robin_gradients=True, compat=compat)
        names = [name for name, _ in model.named_parameters()]
        return [optimizer.get_full_hp_param(name)[0].item() for name in names]

    return World(WORLD).run(run)[0]


def our_file(compat: Compat) -> Numbers:
    """The first element of each weight in a checkpoint of the reference, which is by parameter."""

    def run(rank: Rank) -> list[tuple[str, float]]:
        adam = partial(torch.optim.AdamW, lr=0.0)
        model, optimizer = sharded(rank, adam, round_robin_gradients=True, compat=compat)
        optimizer.backward(model(1.0, len(SIZES)))
        optimizer.step()
        rows: Any = optimizer.state_dict()["fragments"]
        return [(row["name"], row["fp32"][0].item()) for row in rows if row["start"] == 0]

    return [first for _, first in sorted(row for rows in World(WORLD).run(run) for row in rows)]


def on_two_ranks(name: str) -> Numbers:
    """The numbers of rank 0.

    Raises:
        RuntimeError: a rank failed or did not end.
    """
    port = str(free_port())
    with tempfile.TemporaryDirectory() as scratch:
        ranks = [_started(name, rank, port, scratch) for rank in range(WORLD)]
        try:
            said = [rank.communicate(timeout=SECONDS)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        for number, rank in enumerate(ranks):
            if rank.returncode:
                raise RuntimeError(f"rank {number} of {name} failed: {said[number][-2000:]}")
        numbers: Numbers = json.loads(Path(scratch, "0.json").read_text())
    return numbers


def _started(name: str, rank: int, port: str, scratch: str) -> subprocess.Popen[str]:
    group = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return subprocess.Popen(
        [sys.executable, "-m", "twinstep.parity.proof.peers.edge_ranks", name, str(rank), scratch],
        env={**os.environ, **group, **where},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


PLAYS: dict[str, Play] = {
    "Z-1": (partial(on_two_ranks, "summed"), our_sums),
    "Z-3": (partial(on_two_ranks, "viewed"), our_view),
    "CK-9": (partial(on_two_ranks, "converted"), our_file),
}


def main(arguments: list[str]) -> int:
    """One rank."""
    name, rank, folder = arguments[0], int(arguments[1]), Path(arguments[2])
    torch.set_num_threads(1)
    numbers = RUNS[name](rank, folder)
    (folder / f"{rank}.json").write_text(json.dumps(numbers))
    if dist.is_initialized():
        # A group that is alive at exit has threads, and joinable ones abort the process.
        dist.barrier()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
