"""Parts of parameters, as FSDP makes them, and tensors around others: DTensors, late results."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_dtensor(tensor: object) -> bool:
    """True for a DTensor; without the module that has them there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_part(param: Tensor) -> bool:
    """True for what FSDP, of either kind, has split over ranks; it averages gradients."""
    return is_dtensor(param) or getattr(param, "_fsdp_flattened", False)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, in the same memory; any other tensor as it is."""
    return waited(cast(Any, tensor)._local_tensor) if is_dtensor(tensor) else tensor


def waited(tensor: Tensor) -> Tensor:
    """Result of a functional collective, once it is there; any other tensor as it is."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    if module is not None and isinstance(tensor, module.AsyncCollectiveTensor):
        return cast(Tensor, cast(Any, tensor).trigger_wait())
    return tensor


def check_unwrapped(tensor: Tensor, name: str, error: type[Exception], where: str) -> None:
    """Refuse a tensor around others, which has no address of its own.

    Raises:
        Exception: it is one, an error of the given class.
    """
    if is_traceable_wrapper_subclass(tensor):
        raise error(
            f"{name} is a {type(tensor).__name__}, but should have memory of its own, not be "
            f"around other tensors [{where}]"
        )


def check_whole(param: Tensor, where: str) -> None:
    """Refuse a DTensor, and a parameter of FullyShardedDataParallel.

    Raises:
        ValueError: it is one. The second has the class and the address of any other, so that norms
            and flat masters would be made of a part without a word.
    """
    flattened = getattr(param, "_fsdp_flattened", False)
    if flattened or is_dtensor(param):
        what = "a part that FullyShardedDataParallel holds" if flattened else "a DTensor"
        raise ValueError(
            f"parameter is {what}, but should be whole on this rank: FusedAdam by itself steps "
            f"shards, nothing else here does [{where}]"
        )


def check_placements(param: Tensor, where: str) -> None:
    """Require that each element of a DTensor has its value on this rank.

    Raises:
        ValueError: it is a sum over ranks that has not been taken.
    """
    placed = cast(Any, param).placements if is_dtensor(param) else ()
    if any(at.is_partial() for at in placed):
        raise ValueError(f"parameter is placed {placed}, but should not be partial [{where}]")


def check_gradient_shards(params: Iterable[Tensor], where: str) -> None:
    """Require gradients of DTensors that are split as their parameters are.

    Raises:
        RuntimeError: one is split otherwise, or not at all. An update of the local part would take
            it for another.
    """
    for param in params:
        grad: Any = param.grad
        if grad is None or not is_dtensor(param):
            continue
        own: Any = param
        found = (grad.device_mesh, grad.placements) if is_dtensor(grad) else "whole"
        if found != (own.device_mesh, own.placements):
            placed = found if isinstance(found, str) else found[1]
            raise RuntimeError(
                f"gradient is placed {placed}, but should be as its parameter {own.placements} "
                f"[{where}]"
            )
