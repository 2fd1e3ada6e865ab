"""State of the optimizers that keep two moments and a counter for each parameter.

State of a parameter: `step` (int64, shape ()), `exp_avg`, `exp_avg_sq` (shaped like the parameter).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from twinstep.fast.checks import FLOATS, names_of
from twinstep.fast.errors import in_words
from twinstep.fast.strides import steps_of

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

    def checked(given: StateDict) -> StateDict:
        wrapped = _wrapped(given, type(optimizer).__name__)
        _require_shapes(optimizer, wrapped)
        return wrapped

    hooks = (
        optimizer.register_load_state_dict_pre_hook(lambda _, given: checked(given)),
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
    state = {number: dict(entries) for number, entries in saved.items()}
    for number, entries in state.items():
        where = f"parameter {number}, {name}.load_state_dict"
        lacking = [key for key in ("step", *MOMENTS) if key not in entries]
        if entries and lacking:
            raise ValueError(f"state has no {', '.join(lacking)}, but should have it [{where}]")
        for key in MOMENTS if entries else ():
            moment = entries[key]
            if not (isinstance(moment, Tensor) and moment.is_floating_point()):
                raise ValueError(f"{key} should be a floating-point tensor, but is not [{where}]")
            require_elements(moment, key, where)
            entries[key] = _Wrapped(moment)
        if entries:
            entries["step"] = _Wrapped(steps_from(entries["step"], where))
    return {**given, "state": state}


def _require_shapes(optimizer: torch.optim.Optimizer, given: StateDict) -> None:
    """Require moments shaped like their parameters; groups are compared by torch, later."""
    rows = cast("list[dict[str, list[object]]]", given["param_groups"])
    numbers = [number for row in rows for number in row["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = cast(dict[object, dict[str, _Wrapped]], given["state"])
    for number, param in zip(numbers, params, strict=False):
        for key in MOMENTS if state.get(number) else ():
            shape = cast(Tensor, state[number][key].value).shape
            if shape != param.shape:
                raise ValueError(
                    f"{key} has shape {tuple(shape)}, but should have {tuple(param.shape)} "
                    f"[parameter {number}, {type(optimizer).__name__}.load_state_dict]"
                )


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


def steps_from(value: object, where: str) -> int:
    """Return a saved counter.

    Raises:
        ValueError: it is no whole number of steps.
    """
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 and not value.is_meta else value.shape
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"step={in_words(value)}, but should be a whole number of steps [{where}]")
    # NaN and infinity are no integers.
    if value < 0 or value >= 2**63 or not float(value).is_integer():
        raise ValueError(f"step={in_words(value)}, but should be a whole number of steps [{where}]")
    return int(value)


def require_elements(tensor: Tensor, name: str, where: str) -> None:
    """Require a dense tensor whose elements lie in memory.

    Raises:
        ValueError: it is sparse, quantised or on the meta device.
    """
    usual = tensor.layout == torch.strided and not tensor.is_quantized
    if not usual or tensor.is_meta:
        quantized = "quantised" if tensor.is_quantized else str(tensor.layout)
        found = "on the meta device" if tensor.is_meta else quantized
        raise ValueError(f"{name} is {found}, but should hold its elements in memory [{where}]")


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
