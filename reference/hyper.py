"""Hyper-parameters at the door: floats or 0-dim tensors in, checked values and controls out."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

Number = float | Tensor


def control(value: Number, device: torch.device) -> Tensor:
    """A hyper-parameter as a control: float64, shape (), on the data's device.

    A tensor keeps the value that it holds: lr = 0.1 in fp32 is not 0.1 in float64. On a GPU the
    control must lie on the GPU too: torch divides a CUDA tensor by a CPU scalar by multiplying
    with the reciprocal, which rounds twice.
    """
    if isinstance(value, Tensor):
        return value.detach().to(device=device, dtype=torch.float64).reshape(())
    return torch.tensor(value, dtype=torch.float64, device=device)


def check_adam(group: Mapping[str, object], where: str) -> None:
    """Check the hyper-parameters of one parameter group.

    Args:
        group: lr, betas, eps, weight_decay and bias_correction.
        where: the class, for the message.

    Raises:
        ValueError: a value is out of range or not finite.
        TypeError: a value is no number, or bias_correction is no bool.
    """
    _require_at_least_zero("lr", group["lr"], where)
    _require_at_least_zero("eps", group["eps"], where)
    _finite("weight_decay", group["weight_decay"], where)
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"betas={betas!r}, but should be two numbers [{where}]")
    for name, beta in zip(("betas[0]", "betas[1]"), betas, strict=True):
        if not 0.0 <= _finite(name, beta, where) < 1.0:
            raise ValueError(f"{name}={float(beta)}, but should be in [0, 1) [{where}]")
    if not isinstance(group["bias_correction"], bool):
        got = group["bias_correction"]
        raise TypeError(f"bias_correction={got!r}, but should be True or False [{where}]")


def check_ratio(group: Mapping[str, object], where: str) -> None:
    """Check the bounds of LAMB's trust ratio, and the limit of a gradient's norm.

    Args:
        group: min_coeff, max_coeff and max_grad_norm.
        where: the class, for the message.

    Raises:
        ValueError: a value is out of range or not finite.
        TypeError: a value is no number.
    """
    _require_at_least_zero("min_coeff", group["min_coeff"], where)
    low, high = (_finite(name, group[name], where) for name in ("min_coeff", "max_coeff"))
    if high < low:
        raise ValueError(f"max_coeff={high}, but should be at least min_coeff={low} [{where}]")
    _finite("max_grad_norm", group["max_grad_norm"], where)


def _require_at_least_zero(name: str, value: object, where: str) -> None:
    number = _finite(name, value, where)
    if number < 0.0:
        raise ValueError(f"{name}={number}, but should be at least 0 [{where}]")


def _finite(name: str, value: object, where: str) -> float:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            shape = tuple(value.shape)
            raise ValueError(f"{name} has shape {shape}, but should have one element [{where}]")
    elif not isinstance(value, int | float):
        kind = type(value).__name__
        raise TypeError(f"{name} is a {kind}, but should be a number or a tensor [{where}]")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name}={number}, but should be finite [{where}]")
    return number
