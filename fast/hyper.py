"""Hyper-parameters of `FusedAdam` and `FusedLamb`, checked where they come in."""

import math
from collections.abc import Mapping

from torch import Tensor


def number_of(name: str, value: object, where: str) -> float:
    """Return a finite number, or say what is wrong with the value.

    Raises:
        TypeError: neither a number nor a tensor.
        ValueError: a tensor of several elements, or not finite.
    """
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(
            f"{name} has {value.numel()} elements, but should have one element [{where}]"
        )
    if not isinstance(value, Tensor | int | float):
        raise TypeError(f"{name}={value!r}, but should be a number or a 0-dim tensor [{where}]")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name}={number}, but should be finite [{where}]")
    return number


def check_group(group: Mapping[str, object], where: str) -> None:
    """Check lr, betas, eps, weight_decay and bias_correction of one parameter group.

    Raises:
        TypeError: a value is no number, betas are not two, bias_correction is no bool.
        ValueError: a value is not finite, lr or eps is negative, a beta is not in [0, 1).
    """
    for name in ("lr", "eps", "weight_decay"):
        number = number_of(name, group[name], where)
        if number < 0.0 and name != "weight_decay":
            raise ValueError(f"{name}={number}, but should be at least 0 [{where}]")
    betas = group["betas"]
    if not (isinstance(betas, list | tuple) and len(betas) == 2):
        raise TypeError(f"betas={betas!r}, but should be two numbers [{where}]")
    for index in (0, 1):
        beta = number_of(f"betas[{index}]", betas[index], where)
        if beta < 0.0 or beta >= 1.0:
            raise ValueError(f"betas[{index}]={beta}, but should be in [0, 1) [{where}]")
    if group["bias_correction"] not in (True, False) or isinstance(group["bias_correction"], float):
        raise TypeError(
            f"bias_correction={group['bias_correction']!r}, but should be True or False [{where}]"
        )


def check_trust(group: Mapping[str, object], where: str) -> None:
    """Check max_coeff, min_coeff and max_grad_norm of one parameter group of LAMB.

    Raises:
        TypeError: a value is no number.
        ValueError: a value is not finite, min_coeff is negative or above max_coeff.
    """
    number_of("max_grad_norm", group["max_grad_norm"], where)
    least = number_of("min_coeff", group["min_coeff"], where)
    most = number_of("max_coeff", group["max_coeff"], where)
    if least < 0.0:
        raise ValueError(f"min_coeff={least}, but should be at least 0 [{where}]")
    if least > most:
        raise ValueError(f"max_coeff={most}, but should be at least min_coeff={least} [{where}]")
