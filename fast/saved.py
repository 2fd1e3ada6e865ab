"""What a saved state has to look like, checked whole before anything changes."""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from fast.moments import StateDict


def require_entries(state_dict: object, names: Sequence[str], where: str) -> Mapping[str, object]:
    """Return a state dict that has these entries.

    Raises:
        ValueError: it is no dict, or lacks one.
    """
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"state is a {type(state_dict).__name__}, but should be a dict [{where}]")
    for name in names:
        if name not in state_dict:
            raise ValueError(f"state has no {name}, but should have one [{where}]")
    return state_dict


def clip_of(state_dict: Mapping[str, object], now: float, where: str) -> float:
    """Return the saved clip norm, or the one of now where none is saved.

    Raises:
        ValueError: it is no number.
    """
    value = state_dict.get("clip_grad", now)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise ValueError(f"clip_grad={value!r}, but should be a number [{where}]")


def tensors_like(saved: object, own: Sequence[Tensor], name: str, where: str) -> list[Tensor]:
    """Return saved tensors, one for each of ours and of the same numel.

    Raises:
        ValueError: they are not that.
    """
    if not isinstance(saved, list | tuple) or len(saved) != len(own):
        found = len(saved) if isinstance(saved, list | tuple) else type(saved).__name__
        raise ValueError(f"{name} has {found} tensors, but should have {len(own)} [{where}]")
    for index, (tensor, like) in enumerate(zip(saved, own, strict=True)):
        if not (isinstance(tensor, Tensor) and tensor.is_floating_point()):
            raise ValueError(f"{name}[{index}] should be a floating-point tensor [{where}]")
        if tensor.numel() != like.numel():
            raise ValueError(
                f"{name}[{index}] has {tensor.numel()} elements, but should have {like.numel()} "
                f"[{where}]"
            )
    return [tensor.detach() for tensor in saved]


def state_inside(optimizer: torch.optim.Optimizer, saved: object, where: str) -> StateDict:
    """Return the saved state of an optimizer, once it is known to fit.

    Options that its groups lack stay as they are now.

    Raises:
        ValueError: it is none, or groups, their sizes or shapes of state differ.
    """
    given = _of_an_optimizer(saved, where)
    sizes = [len(cast("list[int]", group["params"])) for group in given["param_groups"]]
    wanted = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != wanted:
        raise ValueError(
            f"state has groups of {sizes} parameters, but should have {wanted} [{where}]"
        )
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [at for group in given["param_groups"] for at in cast("list[int]", group["params"])]
    entries = cast(dict[int, dict[str, object]], given["state"])
    for number, param in zip(numbers, params, strict=True):
        for name, value in entries.get(number, {}).items():
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape != param.shape:
                raise ValueError(
                    f"{name} of parameter {number} has shape {tuple(value.shape)}, but should "
                    f"have {tuple(param.shape)} [{where}]"
                )
    now = optimizer.state_dict()["param_groups"]
    groups = [{**own, **theirs} for own, theirs in zip(now, given["param_groups"], strict=True)]
    return {**given, "param_groups": groups}


def _of_an_optimizer(saved: object, where: str) -> dict[str, list[dict[str, object]]]:
    if isinstance(saved, dict):
        groups, state = saved.get("param_groups"), saved.get("state")
        whole = isinstance(groups, list) and isinstance(state, dict)
        if whole and all("params" in group for group in cast("list[StateDict]", groups)):
            return cast("dict[str, list[dict[str, object]]]", saved)
    raise ValueError(f"optimizer_state_dict should be that of an optimizer, but is not [{where}]")
