"""State of the optimizers that keep two moments and a counter for each parameter.

State of a parameter: `step` (int64, shape ()), `exp_avg`, `exp_avg_sq` (shaped like the parameter).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import cast

import torch
from torch import Tensor

from twinstep.contract.errors import in_words
from twinstep.contract.tensors import check_in_memory, check_param

MOMENTS = ("exp_avg", "exp_avg_sq")
StateDict = dict[str, object]
State = dict[str, Tensor]


def new_state(param: Tensor, dtype: torch.dtype = torch.float32) -> State:
    """State before a first step: moments of zero in the given dtype, on the parameter's device."""
    step = torch.zeros((), dtype=torch.int64, device=param.device)
    moments = {name: torch.zeros_like(param, dtype=dtype, requires_grad=False) for name in MOMENTS}
    return {"step": step, **moments}


def check_added_group(optimizer: torch.optim.Optimizer) -> None:
    """Require known parameters in the group that was added last, or remove it again.

    Raises:
        ValueError: a dtype is not fp16, bf16 or fp32, or elements of a parameter share memory.
    """
    *earlier, added = optimizer.param_groups
    where = f"group {len(earlier)}, parameter {{}}, {type(optimizer).__name__}"
    try:
        for index, param in enumerate(added["params"]):
            check_param(param, where.format(index))
    except ValueError:
        optimizer.param_groups.pop()
        raise


@contextmanager
def loading_as_stored(
    optimizer: torch.optim.Optimizer, initial: Callable[[Tensor], State]
) -> Iterator[None]:
    """Let `load_state_dict` inside the block keep every state tensor in the dtype it is stored in.

    torch rounds every loaded state tensor to its parameter's dtype: fp32 moments of an fp16
    parameter would lose 13 bits, and small second moments would become 0. Here state is taken from
    the dict itself, after all pre-hooks and before all post-hooks, and copied.

    Args:
        optimizer: whose state is loaded.
        initial: makes the state of a parameter.

    Raises:
        ValueError: a counter counts no steps, or a moment is missing or has another shape. The
            optimizer is unchanged.
    """
    loaded: dict[Tensor, State] = {}
    hooks = (
        optimizer.register_load_state_dict_pre_hook(
            lambda _, given: loaded.update(_restored(optimizer, given, initial))
        ),
        optimizer.register_load_state_dict_post_hook(
            lambda _: optimizer.state.update(loaded), prepend=True
        ),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _restored(
    optimizer: torch.optim.Optimizer, given: StateDict, initial: Callable[[Tensor], State]
) -> dict[Tensor, State]:
    groups = cast("list[dict[str, list[int]]]", given["param_groups"])
    saved = cast("dict[int, Mapping[str, object]]", given["state"])
    numbers = chain.from_iterable(group["params"] for group in groups)
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    where = f"parameter {{}}, {type(optimizer).__name__}.load_state_dict"
    # Groups that do not match are refused by torch, right after this, with its own message.
    return {
        param: _restored_one(initial(param), saved[number], where.format(number))
        for param, number in zip(params, numbers, strict=False)
        if saved.get(number)
    }


def _restored_one(restored: State, saved: Mapping[str, object], where: str) -> State:
    missing = [name for name in restored if name not in saved]
    if missing:
        raise ValueError(f"state has no {', '.join(missing)}, but should [{where}]")
    # In order: with two faults, the same one is named on every run.
    restored["step"].fill_(whole_steps(saved["step"], where))
    for name in MOMENTS:
        moment = saved[name]
        if not isinstance(moment, Tensor) or not moment.is_floating_point():
            raise ValueError(f"{name} should be a floating-point tensor, but is not [{where}]")
        check_in_memory(moment, name, where)
        if moment.shape != restored[name].shape:
            raise ValueError(
                f"{name} has shape {tuple(moment.shape)}, but should have "
                f"{tuple(restored[name].shape)} [{where}]"
            )
        restored[name].copy_(moment)
    return restored


def whole_steps(value: object, where: str) -> int:
    """A saved counter.

    Raises:
        ValueError: it is no whole number of steps; NaN is none.
    """
    number = value
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        number = value.item()
    plain = isinstance(number, int | float) and not isinstance(number, bool)
    # NaN fails the comparison, and infinity is no whole number.
    if plain and 0 <= cast(float, number) < 2**63 and float(cast(float, number)).is_integer():
        return int(cast(float, number))
    raise ValueError(f"step={in_words(number)}, but should be a whole number of steps [{where}]")
