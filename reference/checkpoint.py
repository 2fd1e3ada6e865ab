"""Checkpoints: read safely, checked whole before anything changes.

A checkpoint is a dict of tensors and plain values. It is read with `weights_only=True`, so that a
file can run no code; the one class that DeepSpeed's files name is replaced by ours.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from twinstep.contract.fragments import FragmentAddress
from twinstep.contract.tensors import check_in_memory


class SavedScaler:
    """What stands for a scaler of DeepSpeed's: its attributes, and nothing that can be called."""


# What is made instead of a class in DeepSpeed's files, and its name there.
FOREIGN: list[Callable[..., object] | tuple[Callable[..., object], str]] = [
    (FragmentAddress, "deepspeed.utils.tensor_fragment.fragment_address"),
    (SavedScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (SavedScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]
BROKEN = (
    RuntimeError,
    pickle.UnpicklingError,
    EOFError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
)
# Key of a state dict -> whose it is; the first that is there decides.
OWNERS = {
    "zero_stage": "a ZeRO optimizer",
    "fp32_groups_flat": "FP16Optimizer",
    "fp32_groups": "FP16UnfusedOptimizer",
    "single_partition_of_fp32_groups": "BF16Optimizer",
}
# Keys under which whole checkpoints of DeepSpeed hold the state of an optimizer.
HOLDERS = ("optimizer", "optimizer_state_dict")


def read_checkpoint(path: Path) -> dict[str, object]:
    """Read a checkpoint file.

    Raises:
        ValueError: the file is truncated, is no checkpoint, or holds anything but tensors and plain
            values.
        OSError: the file cannot be opened.
    """
    loaded = _read(path)
    if not isinstance(loaded, dict):
        raise ValueError(f"{path.name} holds a {type(loaded).__name__}, but should hold a dict")
    return loaded


def read_number(path: Path) -> float:
    """Read a file that holds one number.

    Raises:
        ValueError: it does not, or is broken.
        OSError: the file cannot be opened.
    """
    loaded = _read(path)
    if isinstance(loaded, Tensor) and loaded.numel() == 1:
        return float(loaded)
    if isinstance(loaded, int | float) and not isinstance(loaded, bool):
        return float(loaded)
    raise ValueError(f"{path.name} holds a {type(loaded).__name__}, but should hold a number")


def _read(path: Path) -> object:
    try:
        with torch.serialization.safe_globals(FOREIGN):
            loaded: object = torch.load(path, map_location="cpu", weights_only=True)
    except BROKEN as error:
        raise ValueError(
            f"{path.name} should be a whole checkpoint of tensors and plain values, "
            f"but {_complaint(error)}"
        ) from error
    return loaded


def _complaint(error: Exception) -> str:
    """What torch says, in a few words; its own advice is to trust the file."""
    code = re.search(r"GLOBAL (\S+)", str(error))
    if code is not None:
        return f"names code: {code[1]}"
    said = re.search(r"WeightsUnpickler error: (.+)", str(error))
    lines = (said[1] if said else str(error)).strip().splitlines() or [type(error).__name__]
    return f"cannot be read: {lines[0].split('. ')[0][:150].strip()}"


def require_keys(state_dict: Mapping[str, object], keys: Sequence[str], where: str) -> None:
    """Require keys of a state dict.

    Raises:
        ValueError: some are missing, or it is no dict.
    """
    if not isinstance(state_dict, Mapping):
        kind = type(state_dict).__name__
        raise ValueError(f"state is a {kind}, but should be a dict [{where}]")
    missing = [key for key in keys if key not in state_dict]
    if missing:
        raise ValueError(f"state lacks {', '.join(missing)}{_owner(state_dict)} [{where}]")


def _owner(state_dict: Mapping[str, object]) -> str:
    """Whose state it looks like."""
    for key, owner in OWNERS.items():
        if key in state_dict:
            return f", and looks like that of {owner}"
    for key in HOLDERS:
        inside = state_dict.get(key)
        if isinstance(inside, Mapping) and "ds_version" in state_dict:
            return f", and looks like a whole checkpoint of DeepSpeed; pass what is under {key}"
    return ""


def matching_tensors(
    saved: object,
    wanted: Sequence[Tensor],
    name: str,
    where: str,
    *,
    least: Sequence[int] | None = None,
) -> list[Tensor]:
    """Saved tensors that fit the wanted ones, in order.

    Args:
        saved: what the dict holds.
        wanted: give number, shapes and dtypes.
        name: of the entry, for messages.
        where: the method, for messages.
        least: numels from which a 1-D tensor is long enough; it is extended with zeros.

    Raises:
        ValueError: it is no list of dense tensors of these shapes and dtypes.
    """
    if not isinstance(saved, list | tuple) or not all(isinstance(t, Tensor) for t in saved):
        raise ValueError(f"{name} should be a list of tensors, but is not [{where}]")
    tensors = cast(Sequence[Tensor], saved)
    if len(tensors) != len(wanted):
        raise ValueError(
            f"{name} has {len(tensors)} tensors, but should have {len(wanted)} [{where}]"
        )
    fitting = []
    for index, (tensor, like) in enumerate(zip(tensors, wanted, strict=True)):
        enough = like.numel() if least is None else least[index]
        fitting.append(_fitting(tensor, like, f"{name}[{index}]", where, enough))
    return fitting


def _fitting(tensor: Tensor, like: Tensor, name: str, where: str, least: int) -> Tensor:
    check_in_memory(tensor, name, where)
    if tensor.dtype != like.dtype:
        raise ValueError(f"{name} is {tensor.dtype}, but should be {like.dtype} [{where}]")
    missing = like.numel() - tensor.numel()
    if tensor.dim() == 1 and like.dim() == 1 and 0 < missing <= like.numel() - least:
        return torch.cat([tensor.detach(), torch.zeros(missing, dtype=tensor.dtype)])
    if missing:
        raise ValueError(
            f"{name} has {tensor.numel()} elements, but should have {like.numel()} [{where}]"
        )
    if tensor.shape != like.shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, but should have {tuple(like.shape)} [{where}]"
        )
    return tensor.detach()
