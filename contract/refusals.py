"""Arguments that exist for callers of upstream, and inner optimizers that a class cannot take."""

from __future__ import annotations

import inspect

import torch

from twinstep.contract.tensors import dtype_names

ACCUMULATION = (torch.float32, torch.bfloat16)


def refuse_legacy_adam(fused_adam_legacy: bool, where: str) -> None:
    """Refuse fused_adam_legacy=True.

    Raises:
        RuntimeError: it is True.
    """
    if fused_adam_legacy:
        raise RuntimeError(
            "fused_adam_legacy=True, but should be False: no optimizer here takes gradients "
            f"and a scale the old way of apex [{where}]"
        )


def check_legacy_lamb(optimizer: torch.optim.Optimizer, where: str) -> None:
    """Require an optimizer whose step takes gradients, copies and a divisor.

    Raises:
        TypeError: it does not take them.
    """
    taken = inspect.signature(optimizer.step).parameters
    missing = [name for name in ("grads", "output_params", "scale") if name not in taken]
    if missing:
        raise TypeError(
            f"{type(optimizer).__name__}.step takes no {', '.join(missing)}, but should for "
            f"fused_lamb_legacy, as FusedLamb.step does [{where}]"
        )


def refuse_norm_of_part(optimizer: torch.optim.Optimizer, where: str) -> None:
    """Refuse apex's LAMB where a rank holds a part of the gradients alone.

    Raises:
        TypeError: it is one, ours or apex's own.
    """
    if hasattr(optimizer, "use_nvlamb"):
        raise TypeError(
            f"init_optimizer is {type(optimizer).__name__}, but should be another: it clips by the "
            f"norm of all gradients, and a rank has a part of them here [{where}]"
        )


def check_accumulation_dtype(grad_acc_dtype: torch.dtype, where: str) -> None:
    """Require a dtype in which gradients are accumulated.

    Raises:
        ValueError: it is neither fp32 nor bf16.
    """
    if grad_acc_dtype not in ACCUMULATION:
        raise ValueError(
            f"grad_acc_dtype={grad_acc_dtype}, but should be {dtype_names(ACCUMULATION)} [{where}]"
        )


def check_bucket(allgather_bucket_size: int, where: str) -> int:
    """The largest number of elements that one message brings together.

    Raises:
        ValueError: it is not positive.
    """
    if not int(allgather_bucket_size) > 0:
        raise ValueError(
            f"allgather_bucket_size={allgather_bucket_size}, but should be positive [{where}]"
        )
    return int(allgather_bucket_size)
