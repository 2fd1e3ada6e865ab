"""Universal checkpoints written from masters that are split over ranks; `universal` has the layout.

All ranks gather, and the first one writes, into a hidden folder beside that takes the name once
everything is on the disk: an interrupted save leaves no folder that could be taken for a whole one.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from twinstep.contract.agreement import on_all_ranks
from twinstep.contract.checkpoint.universal import WEIGHT
from twinstep.contract.fragments import Partition
from twinstep.contract.moments import whole_steps
from twinstep.contract.parallel import Groups, ModelParallelUnit
from twinstep.contract.whole import WholeTensors

# The layout of the folder is that of this version of DeepSpeed.
FORMAT = "0.19.8"


class Split(Protocol):
    """`ZeroOptimizer` or `BF16Optimizer` of either side."""

    ranks: Groups
    clip_grad: float
    mpu: ModelParallelUnit | None

    @property
    def groups(self) -> Sequence[Partition]:
        """The groups, as laid out on this rank."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer."""


def save_universal_checkpoint(optimizer: Split, folder: Path) -> None:
    """Write a universal checkpoint; all ranks must call it, and the first one writes.

    Nothing of the loss scale is in it: DeepSpeed's is an object of its own.

    Args:
        optimizer: whose masters and state are written.
        folder: new.

    Raises:
        ValueError: the folder is there, there are experts or a model-parallel unit, whose ranks
            have parameters of their own, or another rank cannot. Nothing has been written.
        OSError, RuntimeError: it cannot be written. Nothing is left of it.
    """
    groups, ranks = optimizer.groups, optimizer.ranks
    first = all(not ranks_of or dist.get_rank(ranks_of) == 0 for ranks_of in ranks)
    device = groups[0].master.device
    on_all_ranks(lambda: _check(optimizer, folder, first), ranks, device)
    beside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    error: Exception | None = None
    try:
        for place, contents in _files(groups, optimizer.optimizer, optimizer.clip_grad):
            try:
                if first and error is None:
                    _write(beside / "zero" / place, contents)
            except Exception as caught:
                # Other ranks are in the gathers that follow.
                error = caught
        on_all_ranks(lambda: _finish(beside, folder, first, error), ranks, device)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _check(optimizer: Split, folder: Path, first: bool) -> None:
    if first and folder.exists():
        raise ValueError(f"{folder} is there, but should be new: no save replaces another")
    if optimizer.mpu is not None or any(group.expert is not None for group in optimizer.groups):
        raise ValueError(
            "ranks have experts or parts of parameters, but should have all of each: a universal "
            f"checkpoint has whole ones [{folder}]"
        )


def _files(
    groups: Sequence[Partition], optimizer: torch.optim.Optimizer, clip_grad: float
) -> Iterator[tuple[str, object]]:
    """Paths and contents of all files; a collective for each tensor."""
    options = optimizer.state_dict()["param_groups"]
    yield (
        "optimizer_state.pt",
        {"clip_grad": clip_grad, "ds_version": FORMAT, "param_groups": options},
    )
    tensors = WholeTensors(groups)
    for group in groups:
        state: Mapping[str, object] = optimizer.state.get(group.master, {})
        shape = group.master.shape
        keys = [k for k, v in state.items() if isinstance(v, Tensor) and v.shape == shape]
        for name, param in zip(group.names, group.params, strict=True):
            if not param.numel():
                continue
            for key in (None, *keys):
                yield f"{name}/{key or WEIGHT}.pt", {"param": tensors.read(optimizer, name, key)}
            if "step" in state:
                steps = whole_steps(state["step"], name)
                yield f"{name}/step.pt", torch.tensor(float(steps))


def _write(path: Path, contents: object) -> None:
    """Write one file, which reaches the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(contents, dict):
        held = contents.items()
        contents = {k: v.to("cpu") if isinstance(v, Tensor) else v for k, v in held}
    with open(path, "xb") as file:
        torch.save(contents, file)
        file.flush()
        os.fsync(file.fileno())


def _finish(beside: Path, folder: Path, first: bool, error: Exception | None) -> None:
    """Give the folder its name, or raise what went wrong."""
    if error is not None:
        raise error
    if first:
        for place in sorted({file.parent for file in beside.rglob("*")}):
            _reach_disk(place)
        os.rename(beside, folder)
        _reach_disk(folder.parent)


def _reach_disk(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
