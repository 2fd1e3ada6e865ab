"""What the state of an optimizer is restored from, checked before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import cast

import torch
from torch import Tensor

from twinstep.reference.errors import shown

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
StateDict = dict[str, object]
Initial = Callable[[Tensor], dict[str, Tensor]]


@contextmanager
def loading_as_stored(
    optimizer: torch.optim.Optimizer, initial: Initial, name: str
) -> Iterator[None]:
    """Let `load_state_dict` inside the block keep every state tensor in the dtype it is stored in.

    torch rounds loaded state to the parameter's dtype. Here it is taken from the dict itself, after
    all pre-hooks and before all post-hooks, and copied.

    Args:
        optimizer: whose state is loaded.
        initial: makes the state of a parameter: `step`, and tensors shaped like the parameter.
        name: of the class, for messages.
    """
    loaded: dict[Tensor, dict[str, Tensor]] = {}
    capture = optimizer.register_load_state_dict_pre_hook(
        lambda _, given: loaded.update(_restored(optimizer, given, initial, name))
    )
    restore = optimizer.register_load_state_dict_post_hook(
        lambda _: optimizer.state.update(loaded), prepend=True
    )
    try:
        yield
    finally:
        capture.remove()
        restore.remove()


def _restored(
    optimizer: torch.optim.Optimizer, given: StateDict, initial: Initial, name: str
) -> dict[Tensor, dict[str, Tensor]]:
    groups = cast(list[dict[str, list[int]]], given["param_groups"])
    saved = cast(dict[int, dict[str, Tensor | float]], given["state"])
    ids = chain.from_iterable(group["params"] for group in groups)
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    # Groups that do not match are refused by torch, right after this, with its own message.
    pairs = zip(params, ids, strict=False)
    where = "parameter {}, " + name + ".load_state_dict"
    return {
        p: _restored_one(p, saved[i], initial(p), where.format(i)) for p, i in pairs if saved.get(i)
    }


def _restored_one(
    param: Tensor, saved: dict[str, Tensor | float], restored: dict[str, Tensor], where: str
) -> dict[str, Tensor]:
    if not restored.keys() <= saved.keys():
        wanted = ", ".join(restored)
        raise ValueError(f"state has {', '.join(saved)}, but should have {wanted} [{where}]")
    # In order: with two faults, the same one is named on every run.
    restored["step"].fill_(whole_steps(saved["step"], where))
    for name in (name for name in restored if name != "step"):
        moment = saved[name]
        if not isinstance(moment, Tensor) or not moment.is_floating_point():
            raise ValueError(f"{name} should be a floating-point tensor, but is not [{where}]")
        check_dense_tensor(moment, name, where)
        if moment.shape != param.shape:
            raise ValueError(
                f"{name} has shape {tuple(moment.shape)}, but should have "
                f"{tuple(param.shape)} [{where}]"
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
        number = float(value)
    if isinstance(number, int | float) and not isinstance(number, bool):
        # NaN fails the comparison, and infinity has no whole number.
        if 0 <= number < 2**63 and number == int(number):
            return int(number)
        raise ValueError(f"step={shown(number)}, but should be a whole number of steps [{where}]")
    kind = type(value).__name__
    raise ValueError(f"step is a {kind}, but should be a whole number of steps [{where}]")


def check_dense_tensor(tensor: Tensor, name: str, where: str) -> None:
    """Require elements in memory.

    Raises:
        ValueError: the tensor is sparse, quantised or on the meta device.
    """
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = "on the meta device" if tensor.is_meta else str(tensor.layout)
        kind = "quantised" if tensor.is_quantized else kind
        raise ValueError(f"{name} is {kind}, but should hold its elements in memory [{where}]")


def check_param(param: Tensor, where: str) -> None:
    """Require a dtype that is known here, and memory of its own for every element.

    Raises:
        ValueError: the parameter is not fp16, bf16 or fp32, or elements share memory.
    """
    if param.dtype not in DTYPES:
        raise ValueError(
            f"parameter is {param.dtype}, but should be float16, bfloat16 or float32 [{where}]"
        )
    strides = zip(param.shape, param.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in strides):
        raise ValueError(
            f"elements of the parameter share memory (shape {tuple(param.shape)}, strides "
            f"{param.stride()}), but each should have its own [{where}]"
        )
