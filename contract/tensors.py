"""Parameters, gradients and saved tensors, refused before anything is computed or written."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from twinstep.contract.shards import (
    check_placements,
    check_unwrapped,
    check_whole,
    is_dtensor,
    local_of,
    waited,
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def dtype_names(dtypes: Iterable[torch.dtype], conjunction: str = "or") -> str:
    """Dtypes in words.

    >>> dtype_names((torch.float16, torch.float32))
    'float16 or float32'
    """
    return f" {conjunction} ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_param(param: Tensor, where: str, *, shards: bool = False) -> None:
    """Require fp16, bf16 or fp32, and memory of its own for each element.

    Args:
        param: of a model.
        where: the class, for messages.
        shards: parts of a DTensor are taken.

    Raises:
        ValueError: the parameter is something else, has no memory, or elements share it.
    """
    (check_placements if shards else check_whole)(param, where)
    check_unwrapped(local_of(param), "parameter", ValueError, where)
    if param.dtype not in FLOATS:
        raise ValueError(
            f"parameter is {dtype_names([param.dtype])}, but should be {dtype_names(FLOATS)} "
            f"[{where}]"
        )
    strides = zip(param.shape, param.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in strides):
        raise ValueError(
            f"parameter has shape {tuple(param.shape)} and strides {param.stride()}, but should "
            f"have memory of its own for each element [{where}]"
        )


def check_dense_gradients(params: Iterable[Tensor], where: str) -> None:
    """Require dense gradients; a missing one is fine.

    One that a functional collective still brings is waited for and replaced by what it brings.

    Raises:
        RuntimeError: one is sparse, or a tensor around others.
    """
    for param in params:
        if param.grad is None:
            continue
        grad = waited(param.grad)
        if grad is not param.grad:
            param.grad = grad
        check_dense_gradient(local_of(grad) if is_dtensor(param) else grad, where)


def check_dense_gradient(grad: Tensor, where: str) -> None:
    """Require a dense gradient.

    Raises:
        RuntimeError: it is sparse, or a tensor around others.
    """
    check_unwrapped(grad, "gradient", RuntimeError, where)
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"gradient has layout {grad.layout}, but should be dense: every element of the "
            f"moments decays at every step [{where}]"
        )


def check_in_memory(tensor: Tensor, name: str, where: str) -> None:
    """Require a dense tensor whose elements lie in memory.

    Raises:
        ValueError: it is sparse, quantised or on the meta device.
    """
    kind = ""
    if tensor.is_quantized:
        kind = "quantised"
    elif tensor.is_meta:
        kind = "on the meta device"
    elif tensor.layout != torch.strided:
        kind = str(tensor.layout)
    if kind:
        raise ValueError(f"{name} is {kind}, but should hold its elements in memory [{where}]")


def drop_gradients(params: Iterable[Tensor], *, set_to_none: bool = True) -> None:
    """Drop the gradients of these parameters, or write zeros into them."""
    for param in params:
        if set_to_none or param.grad is None:
            param.grad = None
            continue
        # With `create_graph` a gradient has a graph of its own. One that is a view has none, and
        # could not be detached in place.
        if param.grad.grad_fn is not None:
            param.grad.detach_()
        param.grad.requires_grad_(False).zero_()
