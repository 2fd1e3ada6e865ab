"""State of the optimizers that keep two moments and a counter for each parameter.

State of a parameter: `step` (int64, shape ()), `exp_avg`, `exp_avg_sq` (shaped like the parameter).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from fast.checks import FLOATS, names_of
from fast.strides import steps_of

MOMENTS = ("exp_avg", "exp_avg_sq")

StateDict = dict[str, object]
Fresh = Callable[[Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class _Wrapped:
    """A value that torch passes on as it is."""

    value: Tensor | float


@contextmanager
def precise_loading(optimizer: torch.optim.Optimizer, fresh: Fresh) -> Iterator[None]:
    """Let `load_state_dict` inside the block keep the precision of moments.

    torch casts every tensor of a state to its parameter's dtype on the way in. Moments and
    counters travel past that in a wrapper that it does not look into, put on after all
    pre-hooks and taken off before all post-hooks. They are copied.

    Args:
        optimizer: whose state is loaded.
        fresh: makes the first state of a parameter.
    """
    name = type(optimizer).__name__
    hooks = (
        optimizer.register_load_state_dict_pre_hook(lambda _, given: _wrapped(given, name)),
        optimizer.register_load_state_dict_post_hook(
            lambda _: _unwrap(optimizer, fresh), prepend=True
        ),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _wrapped(given: StateDict, name: str) -> StateDict:
    saved = cast(dict[object, dict[str, object]], given["state"])
    counts = {
        number: _Wrapped(_count(cast(Tensor, entries["step"]), number, name))
        for number, entries in saved.items()
        if entries
    }
    state = {
        number: {
            key: _Wrapped(cast(Tensor, value)) if key in MOMENTS else value
            for key, value in entries.items()
        }
        for number, entries in saved.items()
    }
    for number, count in counts.items():
        state[number]["step"] = count
    return {**given, "state": state}


def _unwrap(optimizer: torch.optim.Optimizer, fresh: Fresh) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        state = optimizer.state.get(param)
        if not state:
            continue
        new = fresh(param)
        new["step"].fill_(state["step"].value)
        for name in MOMENTS:
            new[name].copy_(state[name].value)
        state.update(new)


def _count(value: Tensor | float, number: object, name: str) -> int:
    count = float(value)
    if count < 0.0 or not count.is_integer():
        raise ValueError(
            f"step={count}, but should be a whole number of steps "
            f"[parameter {number}, {name}.load_state_dict]"
        )
    return int(count)


def contiguous(row: Sequence[Tensor]) -> bool:
    """Say whether all tensors of a parameter lie in memory in the order of their indices."""
    return all(tensor.is_contiguous() for tensor in row)


def require_dense(grad: Tensor, where: str) -> None:
    """Require a dense gradient.

    Raises:
        RuntimeError: it is sparse.
    """
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"gradient has layout {grad.layout}, but should be dense: moments decay everywhere "
            f"[{where}]"
        )


def require_param(param: Tensor, where: str) -> None:
    """Require fp16, bf16 or fp32, and memory of its own for each element.

    Raises:
        ValueError: the parameter is something else, or overlaps itself.
    """
    if param.dtype not in FLOATS:
        raise ValueError(
            f"parameter is {names_of((param.dtype,))}, but should be {names_of(FLOATS)} [{where}]"
        )
    if any(stride == 0 for stride, size in steps_of(param) if size > 1):
        raise ValueError(
            f"parameter has shape {tuple(param.shape)} and strides {param.stride()}, but should "
            f"have memory of its own for each element [{where}]"
        )
