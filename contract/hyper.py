"""Hyper-parameters of the optimizers with moments, checked where they come in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import cast

from torch import Tensor

from twinstep.contract.errors import in_words

Number = float | Tensor


def check_adam(group: Mapping[str, object], where: str) -> None:
    """Check lr, betas, eps, weight_decay and bias_correction of one parameter group.

    Raises:
        TypeError: a value is no number, betas are not two, bias_correction is no bool.
        ValueError: a value is not finite, lr or eps is negative, a beta is not in [0, 1).
    """
    _require_at_least_zero("lr", group["lr"], where)
    _require_at_least_zero("eps", group["eps"], where)
    _finite("weight_decay", group["weight_decay"], where)
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"betas={in_words(betas)}, but should be two numbers [{where}]")
    for name, beta in zip(("betas[0]", "betas[1]"), betas, strict=True):
        if not 0.0 <= _finite(name, beta, where) < 1.0:
            raise ValueError(f"{name}={float(beta)}, but should be in [0, 1) [{where}]")
    _require_bool("bias_correction", group["bias_correction"], where)


def check_lamb(group: Mapping[str, object], where: str) -> None:
    """Check min_coeff, max_coeff and max_grad_norm of one parameter group of LAMB, after the rest.

    Raises:
        TypeError: a value is no number.
        ValueError: a value is not finite, min_coeff is negative or above max_coeff.
    """
    check_adam(group, where)
    _require_at_least_zero("min_coeff", group["min_coeff"], where)
    low, high = (_finite(name, group[name], where) for name in ("min_coeff", "max_coeff"))
    if high < low:
        raise ValueError(f"max_coeff={high}, but should be at least min_coeff={low} [{where}]")
    _finite("max_grad_norm", group["max_grad_norm"], where)


def check_apex_lamb(group: Mapping[str, object], where: str) -> None:
    """Check max_grad_norm and grad_averaging of one group of apex's LAMB, after the rest.

    Raises:
        TypeError: max_grad_norm is no number, grad_averaging no bool.
        ValueError: max_grad_norm is not finite.
    """
    check_adam(group, where)
    _finite("max_grad_norm", group["max_grad_norm"], where)
    _require_bool("grad_averaging", group["grad_averaging"], where)


def check_numbers(groups: Iterable[Mapping[str, object]], where: str) -> None:
    """Require numbers, whatever their value, of all groups; nothing waits for a device.

    Raises:
        TypeError: a hyper-parameter is no number.
    """
    for group in groups:
        for name in ("lr", "eps", "weight_decay"):
            require_number(name, group.get(name, 0.0), where)
        for place, beta in enumerate(cast(Iterable[object], group.get("betas", ()))):
            require_number(f"betas[{place}]", beta, where)


def require_number(name: str, value: object, where: str) -> None:
    """Require a number or a tensor.

    Raises:
        TypeError: the value is something else.
    """
    if not isinstance(value, int | float | Tensor):
        raise TypeError(
            f"{name}={in_words(value)}, but should be a number or a 0-dim tensor [{where}]"
        )


def _require_bool(name: str, flag: object, where: str) -> None:
    if not isinstance(flag, bool):
        raise TypeError(f"{name}={in_words(flag)}, but should be True or False [{where}]")


def _require_at_least_zero(name: str, value: object, where: str) -> None:
    number = _finite(name, value, where)
    if number < 0.0:
        raise ValueError(f"{name}={number}, but should be at least 0 [{where}]")


def _finite(name: str, value: object, where: str) -> float:
    require_number(name, value, where)
    if isinstance(value, Tensor) and value.numel() != 1:
        shape = tuple(value.shape)
        raise ValueError(f"{name} has shape {shape}, but should have one element [{where}]")
    number = float(cast(Number, value))
    if not math.isfinite(number):
        raise ValueError(f"{name}={number}, but should be finite [{where}]")
    return number
