"""Whether a saved state fits the optimizer inside that is to take it. Nothing is written here.

torch checks the number of groups and of parameters alone. What it lets through fails in a later
step, or silently makes another optimizer: SGD's state in Adam, a moment of another shape or dtype,
a counter that is not a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import cast

import torch
from torch import Tensor

from twinstep.contract.errors import in_words
from twinstep.contract.hyper import check_adam, check_lamb
from twinstep.contract.moments import StateDict, whole_steps
from twinstep.contract.tensors import check_in_memory
from twinstep.reference.fused_adam import FusedAdam
from twinstep.reference.fused_lamb import FusedLamb

ADAM = ("step", "exp_avg", "exp_avg_sq")
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
# Options that change what a step does, and that our optimizers do not have.
OTHER_RULES = ("amsgrad", "maximize")
Group = Mapping[str, object]


def inner_state(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, object], key: str, where: str
) -> StateDict:
    """The dict for the optimizer inside; flags that its groups lack stay as they are now.

    Args:
        optimizer: the one inside; not changed.
        state_dict: of the wrapper.
        key: under which it holds the dict.
        where: the method, for messages.

    Raises:
        ValueError: it is not there, or does not fit: groups, their sizes, options, or the names,
            shapes, dtypes and counters of state.
    """
    return fitting(optimizer, parsed_inner_state(state_dict, key, where), where)


def parsed_inner_state(state_dict: Mapping[str, object], key: str, where: str) -> StateDict:
    """The dict of some optimizer.

    Raises:
        ValueError: it is not there, or is none.
    """
    inner = state_dict.get(key)
    if isinstance(inner, dict) and {"state", "param_groups"} <= inner.keys():
        groups, state = inner["param_groups"], inner["state"]
        whole = isinstance(groups, list) and isinstance(state, dict)
        if whole and all(_is_group(group) for group in groups):
            return cast(StateDict, inner)
    raise ValueError(f"{key} should be the state dict of an optimizer, but is not [{where}]")


def _is_group(group: object) -> bool:
    params = group.get("params") if isinstance(group, dict) else None
    return isinstance(params, list) and all(isinstance(number, int) for number in params)


def fitting(optimizer: torch.optim.Optimizer, saved: StateDict, where: str) -> StateDict:
    """The same as `inner_state`, for a dict that `parsed_inner_state` has found."""
    given = cast(Sequence[Mapping[str, Sequence[int]]], saved["param_groups"])
    sizes = [len(group["params"]) for group in given]
    wanted = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != wanted:
        raise ValueError(
            f"state has groups of {sizes} parameters, but should have {wanted} [{where}]"
        )
    state = cast(Mapping[object, object], saved["state"])
    numbers = list(chain.from_iterable(group["params"] for group in given))
    strangers = [str(number) for number in state if number not in numbers]
    if strangers or len(set(numbers)) != len(numbers):
        said = ", ".join(strangers) or "one parameter twice"
        raise ValueError(f"state has {said}, but should have {numbers} once each [{where}]")
    own = optimizer.state_dict()["param_groups"]
    groups = [{**mine, **theirs} for mine, theirs in zip(own, given, strict=True)]
    for index, (theirs, group) in enumerate(zip(given, groups, strict=True)):
        _check_options(optimizer, theirs, group, f"group {index}, {where}")
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    flags = [bool(group.get("amsgrad")) for group in groups for _ in group["params"]]
    for number, param, flag in zip(numbers, params, flags, strict=True):
        _check_state(optimizer, param, state.get(number, {}), flag, f"parameter {number}, {where}")
    return {**saved, "param_groups": groups}


def _check_options(
    optimizer: torch.optim.Optimizer, theirs: Group, group: Group, where: str
) -> None:
    """Require options that this class has, with values that it takes."""
    name = type(optimizer).__name__
    lacking = [
        option
        for option, value in optimizer.defaults.items()
        if not isinstance(value, bool | None) and option not in theirs
    ]
    if lacking:
        raise ValueError(f"state has no {', '.join(lacking)}, but {name} should have it [{where}]")
    if "max_coeff" in theirs and "max_coeff" not in optimizer.defaults:
        raise ValueError(f"state has max_coeff, as that of LAMB, but {name} should not [{where}]")
    if not isinstance(optimizer, FusedAdam | FusedLamb):
        for option, like in optimizer.defaults.items():
            _check_option(option, group[option], like, where)
        return
    for option in OTHER_RULES:
        if theirs.get(option) is True:
            raise ValueError(f"{option}=True, but should be False: {name} has none [{where}]")
    try:
        check_adam(group, where)
        if isinstance(optimizer, FusedLamb):
            check_lamb(group, where)
    except TypeError as error:
        raise ValueError(str(error)) from error


def _check_option(name: str, value: object, like: object, where: str) -> None:
    """Require a number where this class has a number, and as many where it has several."""
    if isinstance(like, tuple | list):
        if not isinstance(value, tuple | list) or len(value) != len(like):
            raise ValueError(
                f"{name}={in_words(value)}, but should be {len(like)} numbers [{where}]"
            )
        for index, (one, its) in enumerate(zip(value, like, strict=True)):
            _check_option(f"{name}[{index}]", one, its, where)
    elif isinstance(like, int | float | Tensor) and not isinstance(like, bool):
        number = _number(value)
        if number is None or number != number:
            raise ValueError(f"{name}={in_words(value)}, but should be a number [{where}]")


def _number(value: object) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_meta else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _check_state(
    optimizer: torch.optim.Optimizer, param: Tensor, held: object, amsgrad: bool, where: str
) -> None:
    """Require the state of one parameter to be what this class keeps; none is fine."""
    if not isinstance(held, Mapping):
        raise ValueError(f"state is a {type(held).__name__}, but should be a dict [{where}]")
    wanted = _names(optimizer, param, amsgrad)
    if not held or wanted is None:
        wanted = tuple(held)
    if set(held) != set(wanted):
        got = ", ".join(map(str, held))
        raise ValueError(f"state has {got}, but should have {', '.join(wanted)} [{where}]")
    for name, value, like, dtype in _compared(optimizer, param, held):
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name} is a {type(value).__name__}, but should be a tensor [{where}]"
            )
        check_in_memory(value, name, where)
        if value.shape != like.shape:
            # `where` begins with the parameter.
            raise ValueError(
                f"{name} of {where.split(',')[0]} has shape {tuple(value.shape)}, but should have "
                f"{tuple(like.shape)} [{where}]"
            )
        if value.dtype != dtype:
            raise ValueError(f"{name} is {value.dtype}, but should be {dtype} [{where}]")
    if "step" in held:
        whole_steps(held["step"], where)


def _names(
    optimizer: torch.optim.Optimizer, param: Tensor, amsgrad: bool
) -> tuple[str, ...] | None:
    """Names of state that this class keeps of a parameter, as far as they are known."""
    if isinstance(optimizer, FusedAdam | FusedLamb):
        return ADAM
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return (*ADAM, "max_exp_avg_sq") if amsgrad else ADAM
    if isinstance(optimizer, torch.optim.SGD):
        return ("momentum_buffer",)
    return tuple(optimizer.state.get(param, {})) or None


def _compared(
    optimizer: torch.optim.Optimizer, param: Tensor, held: Mapping[str, object]
) -> Iterator[tuple[str, object, Tensor, torch.dtype]]:
    """State of elements, with what its shape and dtype should be."""
    own = optimizer.state.get(param, {})
    for name, value in held.items():
        now = own.get(name)
        if name in MOMENTS:
            # A momentum that no step has filled is None.
            if name != "momentum_buffer" or value is not None:
                yield name, value, param, param.dtype
        elif isinstance(value, Tensor) and value.dim():
            if isinstance(now, Tensor):
                yield name, value, now, now.dtype
            else:
                yield name, value, param, param.dtype if value.is_floating_point() else value.dtype
