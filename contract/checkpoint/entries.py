"""Keys, a clip norm and masters, which every state dict of a wrapper has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from twinstep.contract.errors import in_words
from twinstep.contract.moments import StateDict, whole_steps
from twinstep.contract.tensors import check_in_memory

FLAT, UNFUSED = "fp32_groups_flat", "fp32_groups"
PARTITIONS = "single_partition_of_fp32_groups"
# Key of a state dict -> whose it is; the first that is found decides.
OWNERS = {
    "zero_stage": "a ZeRO optimizer",
    FLAT: "FP16Optimizer",
    UNFUSED: "FP16UnfusedOptimizer",
    PARTITIONS: "BF16Optimizer",
}
# Keys under which whole checkpoints of DeepSpeed hold the state of an optimizer.
HOLDERS = ("optimizer", "optimizer_state_dict")
Entry = TypeVar("Entry")


def copy_of(tensor: Tensor, cpu_offload: bool) -> Tensor:
    """The values of a tensor in other memory, without a graph."""
    held = tensor.detach()
    return held.to("cpu", copy=True) if cpu_offload else held.clone()


def copied(entry: Entry, cpu_offload: bool) -> Entry:
    """A deep copy of dicts, lists and tuples.

    Args:
        entry: of a state dict.
        cpu_offload: copy tensors to the CPU one by one; their device needs no memory for it.
    """
    leaves = tree_leaves(entry) if cpu_offload else ()
    moved = {id(leaf): copy_of(leaf, True) for leaf in leaves if isinstance(leaf, Tensor)}
    return copy.deepcopy(entry, moved)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Contents of a checkpoint that a wrapper takes; everything fits.

    Attributes:
        inner: dict for the inner optimizer; None where it is not asked for.
        masters: in the order of this rank's own.
        clip_grad: None where the checkpoint has none.
    """

    inner: StateDict | None
    masters: list[Tensor]
    clip_grad: float | None


def _steps(loaded: Loaded) -> float | None:
    """Completed steps of the parameter that has most of them; None without state."""
    held = (
        {}
        if loaded.inner is None
        else cast("dict[int, Mapping[str, object]]", loaded.inner["state"])
    )
    counts = [state["step"] for state in held.values() if "step" in state]
    return max((whole_steps(count, "state") for count in counts), default=None)


# Numbers that all ranks should load alike.
SAME: Mapping[str, Callable[[Loaded], float | None]] = {
    "step": _steps,
    "clip_grad": lambda loaded: loaded.clip_grad,
}


def require_keys(state_dict: object, keys: Sequence[str], where: str) -> Mapping[str, object]:
    """Return a state dict that has these keys.

    Raises:
        ValueError: some are missing, or it is no dict.
    """
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"state is a {type(state_dict).__name__}, but should be a dict [{where}]")
    missing = [key for key in keys if key not in state_dict]
    if missing:
        raise ValueError(
            f"state has no {', '.join(missing)}, but should{_owner(state_dict)} [{where}]"
        )
    return state_dict


def _owner(state_dict: Mapping[str, object]) -> str:
    """Words on whose state it seems to be."""
    for key, owner in OWNERS.items():
        if key in state_dict:
            return f"; it seems to be that of {owner}"
    for key in HOLDERS:
        if isinstance(state_dict.get(key), Mapping) and "ds_version" in state_dict:
            return f"; it seems to be a whole checkpoint of DeepSpeed, with the state in {key}"
    return ""


def clip_norm(state_dict: Mapping[str, object], where: str) -> float | None:
    """The saved clip norm; None where none is saved.

    Raises:
        ValueError: it is no number.
    """
    if "clip_grad" not in state_dict:
        return None
    value = state_dict["clip_grad"]
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ValueError(f"clip_grad={in_words(value)}, but should be a number [{where}]")
    return float(value)


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
    enough = [like.numel() for like in wanted] if least is None else least
    return [
        _matching(tensor, like, f"{name}[{index}]", where, enough[index])
        for index, (tensor, like) in enumerate(zip(tensors, wanted, strict=True))
    ]


def _matching(tensor: Tensor, like: Tensor, name: str, where: str, least: int) -> Tensor:
    check_in_memory(tensor, name, where)
    if tensor.dtype != like.dtype:
        raise ValueError(f"{name} is {tensor.dtype}, but should be {like.dtype} [{where}]")
    missing = like.numel() - tensor.numel()
    if tensor.dim() == 1 and like.dim() == 1 and 0 < missing <= like.numel() - least:
        return torch.cat([tensor.detach(), tensor.new_zeros(missing)])
    if missing:
        raise ValueError(
            f"{name} has {tensor.numel()} elements, but should have {like.numel()} [{where}]"
        )
    if tensor.shape != like.shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, but should have {tuple(like.shape)} [{where}]"
        )
    return tensor.detach()
