"""State of the optimizers that keep two moments and a counter for each parameter.

State of a parameter: `step` (int64, shape ()), `exp_avg`, `exp_avg_sq` (shaped like the parameter).
apex's LAMB counts in the group instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor

from twinstep.contract.errors import in_words
from twinstep.contract.tensors import check_param

MOMENTS = ("exp_avg", "exp_avg_sq")
StateDict = dict[str, object]
State = dict[str, Tensor]


def new_state(param: Tensor, dtype: torch.dtype = torch.float32) -> State:
    """State before a first step: moments of zero in the given dtype, on the parameter's device."""
    step = torch.zeros((), dtype=torch.int64, device=param.device)
    return {"step": step, **new_moments(param, dtype)}


def new_moments(param: Tensor, dtype: torch.dtype = torch.float32) -> State:
    """Moments of zero, shaped like the parameter, on its device."""
    return {name: torch.zeros_like(param, dtype=dtype, requires_grad=False) for name in MOMENTS}


@contextmanager
def adding_group(
    optimizer: torch.optim.Optimizer, group: dict[str, object], *, shards: bool = False
) -> Iterator[None]:
    """Add a group inside; one that is refused is not there, and the caller's dict is as it was.

    Args:
        optimizer: gets the group.
        group: the caller's, into which torch writes what it lacks.
        shards: DTensors are taken.

    Raises:
        ValueError: a dtype is not fp16, bf16 or fp32, or elements of a parameter share memory.
    """
    count, before = len(optimizer.param_groups), dict(group)
    where = f"group {count}, parameter {{}}, {type(optimizer).__name__}"
    try:
        yield
        for index, param in enumerate(optimizer.param_groups[count]["params"]):
            check_param(param, where.format(index), shards=shards)
    except BaseException:
        del optimizer.param_groups[count:]
        group.clear()
        group.update(before)
        raise


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
