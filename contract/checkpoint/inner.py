"""A saved state held against the inner optimizer that is to take it. Nothing is written here.

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
from twinstep.contract.hyper import check_adam, check_apex_lamb, check_lamb
from twinstep.contract.moments import MOMENTS, StateDict, whole_steps
from twinstep.contract.tensors import check_in_memory
from twinstep.contract.wrapper import MomentOptimizer

ADAM = ("step", *MOMENTS)
LARGEST, MOMENTUM = "max_exp_avg_sq", "momentum_buffer"
LIKE_PARAM = (*MOMENTS, LARGEST, MOMENTUM)
# Options that change what a step does, and that our optimizers do not have.
OTHER_RULES = ("amsgrad", "maximize", "differentiable")
Options = Mapping[str, object]


def inner_state(
    optimizer: torch.optim.Optimizer,
    saved: object,
    where: str,
    *,
    key: str = "optimizer_state_dict",
) -> StateDict:
    """The dict for the inner optimizer; flags that its groups lack stay as they are now.

    Args:
        optimizer: the inner one; not changed.
        saved: its dict.
        where: the method, for messages.
        key: under which the dict was found, for messages.

    Raises:
        ValueError: it is none, or does not fit: groups, their sizes, options, or the names, shapes,
            dtypes and counters of state.
    """
    whole = parsed_inner_state(saved, where, key)
    given = cast("list[dict[str, list[int]]]", whole["param_groups"])
    state = cast(Mapping[object, object], whole["state"])
    numbers = list(chain.from_iterable(group["params"] for group in given))
    _check_members(optimizer, [len(group["params"]) for group in given], numbers, state, where)
    own = optimizer.state_dict()["param_groups"]
    groups = [completed(optimizer, *pair) for pair in zip(own, given, strict=True)]
    for index, (theirs, group) in enumerate(zip(given, groups, strict=True)):
        check_options(optimizer, theirs, group, f"group {index}, {where}")
    for group, members, ours in zip(groups, given, optimizer.param_groups, strict=True):
        for number, param in zip(members["params"], ours["params"], strict=True):
            names = _names(optimizer, param, bool(group.get("amsgrad")))
            held = _held(state.get(number, {}), names, f"parameter {number}", where)
            _check_state(optimizer, param, held, f"parameter {number}", where)
    # Torch's optimizers take tensors over as they are, and would go on in those of the dict. Ours
    # copy all but counters themselves.
    careful = isinstance(optimizer, MomentOptimizer)
    copied = {
        number: {
            name: value if careful and isinstance(value, Tensor) and value.dim() else _copied(value)
            for name, value in cast(StateDict, held).items()
        }
        for number, held in state.items()
    }
    if not counts_for_groups(optimizer):
        marked = [group for group in given if "step" in group]
        copied = own_counters([group["params"] for group in marked], copied)
    return {**whole, "state": copied, "param_groups": groups}


def counts_for_groups(optimizer: torch.optim.Optimizer) -> bool:
    """True for `FusedAdam` with one counter for each group, `Compat.shared_step_counter`."""
    return isinstance(optimizer, MomentOptimizer) and optimizer.compat.shared_step_counter


def own_counters(
    groups: Sequence[Sequence[object]], state: Mapping[object, Mapping[str, object]]
) -> dict[object, dict[str, object]]:
    """State whose parameters each have the counter that their group shared.

    DeepSpeed's `FusedAdam` counts in the state of a group's last parameter alone, for all of them;
    the others stay at 0, with moments that are not. A group of such a file has `step`, too.

    Args:
        groups: parameters of groups that shared a counter, as keys of the state.
        state: by parameter; not changed.
    """
    found = {number: dict(held) for number, held in state.items()}
    for group in groups:
        counting = [found[number] for number in group if "step" in found.get(number, {})]
        for held in counting[:-1]:
            held["step"] = _copied(counting[-1]["step"])
    return found


def _copied(value: object) -> object:
    """A copy of a tensor; anything else as it is."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def parsed_inner_state(saved: object, where: str, key: str) -> StateDict:
    """The dict of some optimizer.

    Raises:
        ValueError: it is none.
    """
    if isinstance(saved, dict) and isinstance(saved.get("state"), dict):
        groups = saved.get("param_groups")
        if isinstance(groups, list) and all(_is_group(group) for group in groups):
            return cast(StateDict, saved)
    raise ValueError(f"{key} should be the state dict of an optimizer, but is not [{where}]")


def _is_group(group: object) -> bool:
    params = group.get("params") if isinstance(group, dict) else None
    return isinstance(params, list) and all(isinstance(number, int) for number in params)


def _check_members(
    optimizer: torch.optim.Optimizer,
    sizes: Sequence[int],
    numbers: Sequence[int],
    state: Mapping[object, object],
    where: str,
) -> None:
    """Require groups of the same sizes, and state of their parameters alone."""
    wanted = [len(group["params"]) for group in optimizer.param_groups]
    if list(sizes) != wanted:
        raise ValueError(
            f"state has groups of {sizes} parameters, but should have {wanted} [{where}]"
        )
    known = set(numbers)
    strangers = [in_words(number) for number in state if number not in known]
    if strangers or len(known) != len(numbers):
        found = ", ".join(strangers[:5]) or "one parameter twice"
        raise ValueError(
            f"state has {found}, but should have {in_words(list(numbers))} once each [{where}]"
        )


def completed(
    optimizer: torch.optim.Optimizer, mine: Options, theirs: Options
) -> dict[str, object]:
    """A saved group with the options of now that it lacks.

    What is no option of the class, such as a scheduler's `initial_lr`, is gone after a load from a
    file without it, as with torch.
    """
    return {**{name: mine[name] for name in optimizer.defaults if name in mine}, **theirs}


def check_options(
    optimizer: torch.optim.Optimizer, theirs: Options, group: Options, where: str
) -> None:
    """Require options that this class has, with values that it takes.

    Args:
        optimizer: that is to take them.
        theirs: options of a saved group.
        group: the same, completed with those that the file may lack.
        where: the group and the method, for messages.

    Raises:
        ValueError: one is missing, has no such value here, or makes another step.
    """
    name, defaults = type(optimizer).__name__, optimizer.defaults
    missing = [
        option
        for option, value in defaults.items()
        if not isinstance(value, bool | None) and option not in theirs
    ]
    if missing:
        raise ValueError(f"state has no {', '.join(missing)}, but {name} should [{where}]")
    for option, owner in (("max_coeff", "DeepSpeed's LAMB"), ("grad_averaging", "apex's LAMB")):
        if option in theirs and option not in defaults:
            raise ValueError(
                f"state has {option}, as that of {owner}, but {name} should not [{where}]"
            )
    apex = "grad_averaging" in defaults
    if not apex and not isinstance(optimizer, MomentOptimizer):
        for option, like in defaults.items():
            _check_option(option, group[option], like, where)
        return
    for option in OTHER_RULES:
        if theirs.get(option) is True:
            raise ValueError(f"{option}=True, but should be False: {name} has none [{where}]")
    decoupled = theirs.get("decoupled_weight_decay")
    mode = getattr(optimizer, "adam_w_mode", decoupled)
    if isinstance(decoupled, bool) and decoupled is not mode and theirs.get("weight_decay"):
        raise ValueError(
            f"decoupled_weight_decay={decoupled}, but should be {mode}, which is adam_w_mode of "
            f"this {name} [{where}]"
        )
    try:
        check = check_lamb if "max_coeff" in defaults else check_adam
        (check_apex_lamb if apex else check)(group, where)
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
        number = value
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
            number = value.item()
        plain = isinstance(number, int | float) and not isinstance(number, bool)
        if not plain or number != number:
            raise ValueError(f"{name}={in_words(value)}, but should be a number [{where}]")


def _names(
    optimizer: torch.optim.Optimizer, param: Tensor, amsgrad: bool
) -> tuple[str, ...] | None:
    """Names of state that this class keeps of a parameter, as far as they are known."""
    if isinstance(optimizer, MomentOptimizer):
        return ADAM
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return (*ADAM, LARGEST) if amsgrad else ADAM
    if isinstance(optimizer, torch.optim.SGD):
        return (MOMENTUM,)
    return tuple(optimizer.state.get(param, {})) or None


def _held(
    held: object, names: tuple[str, ...] | None, which: str, where: str
) -> Mapping[str, object]:
    """The state of one parameter with the names that this class keeps; none at all is fine."""
    if not isinstance(held, Mapping):
        raise ValueError(
            f"state of {which} is a {type(held).__name__}, but should be a dict [{where}]"
        )
    if held and names is not None and held.keys() != set(names):
        found = ", ".join(map(str, held))
        raise ValueError(
            f"state of {which} has {found}, but should have {', '.join(names)} [{where}]"
        )
    return held


def _check_state(
    optimizer: torch.optim.Optimizer,
    param: Tensor,
    held: Mapping[str, object],
    which: str,
    where: str,
) -> None:
    """Require counters that count, and tensors of the shape and dtype that this class keeps."""
    for name, value, like, dtype in _compared(optimizer, param, held):
        label = f"{name} of {which}"
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise ValueError(f"{label} is a {kind}, but should be a tensor [{where}]")
        check_in_memory(value, label, where)
        if value.shape != like.shape:
            raise ValueError(
                f"{label} has shape {tuple(value.shape)}, but should have {tuple(like.shape)} "
                f"[{where}]"
            )
        if value.dtype != dtype:
            raise ValueError(f"{label} is {value.dtype}, but should be {dtype} [{where}]")
    if "step" in held:
        whole_steps(held["step"], f"{which}, {where}")


def _compared(
    optimizer: torch.optim.Optimizer, param: Tensor, held: Mapping[str, object]
) -> Iterator[tuple[str, object, Tensor, torch.dtype]]:
    """State with elements, and what its shape and dtype should be."""
    own = optimizer.state.get(param, {})
    for name, value in held.items():
        now = own.get(name)
        if name in LIKE_PARAM:
            # A momentum that no step has filled is None.
            if name != MOMENTUM or value is not None:
                yield name, value, param, param.dtype
        elif name != "step" and isinstance(now, Tensor) and now.dim():
            yield name, value, now, now.dtype
        elif name != "step" and isinstance(value, Tensor) and value.dim():
            yield name, value, param, param.dtype if value.is_floating_point() else value.dtype
