"""Checkpoints: read safely, checked whole before anything changes.

A checkpoint is a dict of tensors and plain values. It is read with `weights_only=True`, so that a
file can run no code; the one class that DeepSpeed's files name is replaced by ours.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from reference.fragments import FragmentAddress
from reference.restore import StateDict

# Name of the class in DeepSpeed's files -> what is made instead.
FOREIGN: list[Callable[..., object] | tuple[Callable[..., object], str]] = [
    (FragmentAddress, "deepspeed.utils.tensor_fragment.fragment_address")
]


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
    except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{path.name} should be a whole checkpoint of tensors and plain values, but: {first}"
        ) from error
    return loaded


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
        raise ValueError(f"state lacks {', '.join(missing)} [{where}]")


def matching_tensors(
    saved: object, wanted: Sequence[Tensor], name: str, where: str, *, shorter: bool = False
) -> list[Tensor]:
    """Saved tensors that fit the wanted ones, in order.

    Args:
        saved: what the dict holds.
        wanted: give number and numels.
        name: of the entry, for messages.
        where: the method, for messages.
        shorter: 1-D tensors may be shorter and are extended with zeros.

    Raises:
        ValueError: it is no list of floating-point tensors of these numels.
    """
    if not isinstance(saved, list | tuple) or not all(isinstance(t, Tensor) for t in saved):
        raise ValueError(f"{name} should be a list of tensors, but is not [{where}]")
    tensors = cast(Sequence[Tensor], saved)
    if len(tensors) != len(wanted):
        raise ValueError(
            f"{name} has {len(tensors)} tensors, but should have {len(wanted)} [{where}]"
        )
    return [
        _fitting(tensor, like, f"{name}[{index}]", where, shorter)
        for index, (tensor, like) in enumerate(zip(tensors, wanted, strict=True))
    ]


def _fitting(tensor: Tensor, like: Tensor, name: str, where: str, shorter: bool) -> Tensor:
    if not tensor.is_floating_point():
        raise ValueError(f"{name} is {tensor.dtype}, but should be floating-point [{where}]")
    missing = like.numel() - tensor.numel()
    if missing == 0:
        return tensor.detach()
    if shorter and missing > 0 and tensor.dim() == 1:
        return torch.cat([tensor.detach(), torch.zeros(missing, dtype=tensor.dtype)])
    raise ValueError(
        f"{name} has {tensor.numel()} elements, but should have {like.numel()} [{where}]"
    )


def check_inner_state(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, object], where: str
) -> None:
    """Check that a state fits the optimizer inside, which torch does not do for shapes.

    Raises:
        ValueError: groups, their sizes, or the shape of a tensor of some parameter differ.
    """
    groups = cast(Sequence[Mapping[str, Sequence[int]]], saved["param_groups"])
    sizes = [len(group["params"]) for group in groups]
    wanted = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != wanted:
        raise ValueError(
            f"state has groups of {sizes} parameters, but should have {wanted} [{where}]"
        )
    ids = chain.from_iterable(group["params"] for group in groups)
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    state = cast(Mapping[int, Mapping[str, object]], saved["state"])
    for number, param in zip(ids, params, strict=True):
        for key, value in state.get(number, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape != param.shape:
                raise ValueError(
                    f"{key} of parameter {number} has shape {tuple(value.shape)}, but should have "
                    f"{tuple(param.shape)} [{where}]"
                )


def inner_state(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, object], key: str, where: str
) -> StateDict:
    """The dict for the optimizer inside; options that its groups lack stay as they are now.

    Raises:
        ValueError: it is not there, or does not fit.
    """
    saved = parsed_inner_state(state_dict, key, where)
    check_inner_state(optimizer, saved, where)
    own = optimizer.state_dict()["param_groups"]
    given = cast(Sequence[Mapping[str, object]], saved["param_groups"])
    groups = [{**mine, **theirs} for mine, theirs in zip(own, given, strict=True)]
    return {**saved, "param_groups": groups}


def parsed_inner_state(state_dict: Mapping[str, object], key: str, where: str) -> StateDict:
    """The dict of some optimizer.

    Raises:
        ValueError: it is not there, or is none.
    """
    inner = state_dict.get(key)
    if isinstance(inner, dict) and {"state", "param_groups"} <= inner.keys():
        groups, state = inner["param_groups"], inner["state"]
        whole = isinstance(groups, list) and isinstance(state, dict)
        if whole and all(isinstance(group, dict) and "params" in group for group in groups):
            return cast(StateDict, inner)
    raise ValueError(f"{key} should be the state dict of an optimizer, but is not [{where}]")
