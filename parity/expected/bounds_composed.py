"""Operators that stand for a formula: their bounds are those of the formula.

A kernel may write it in any way that is equal over the real numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Number = float | Tensor
Axes = int | Sequence[int] | None
ROOT_HALF = math.sqrt(0.5)
ROOT_TWO_OVER_PI = math.sqrt(2.0 / math.pi)


def _axes(x: Tensor, dim: Axes) -> list[int]:
    return [dim] if isinstance(dim, int) else list(dim or range(x.dim()))


def _sum(x: Tensor, dim: Axes, keep: bool) -> Tensor:
    return x.sum(_axes(x, dim), keepdim=keep)


def _variance(
    x: Tensor, dim: Axes = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    axes = _axes(x, dim)
    away = x - x.mean(axes, keepdim=True)
    count = math.prod(x.shape[axis] for axis in axes)
    less = 1.0 if correction is None else correction
    return _sum(away * away, axes, keepdim) / max(count - less, 0.0)


def _deviation(
    x: Tensor, dim: Axes = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return _variance(x, dim, correction=correction, keepdim=keepdim).sqrt()


def _norm(
    x: Tensor,
    order: float = 2.0,
    dim: Axes = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    if order in (math.inf, -math.inf):
        pick = torch.amax if order > 0 else torch.amin
        return pick(x.abs(), _axes(x, dim), keepdim)
    if order == 0.0:
        return _sum((x != 0).to(x.dtype), dim, keepdim)
    if order == 1.0:
        return _sum(x.abs(), dim, keepdim)
    if order == 2.0:
        return _sum(x * x, dim, keepdim).sqrt()
    return _sum(x.abs() ** order, dim, keepdim) ** (1.0 / order)


def _exponentials(x: Tensor, dim: int) -> Tensor:
    return (x - x.amax([dim], keepdim=True)).exp()


def _softmax(x: Tensor, dim: int, half: bool = False) -> Tensor:
    powers = _exponentials(x, dim)
    return powers / powers.sum([dim], keepdim=True)


def _log_softmax(x: Tensor, dim: int, half: bool = False) -> Tensor:
    below = x - x.amax([dim], keepdim=True)
    return below - below.exp().sum([dim], keepdim=True).log()


def _log_sum_exp(x: Tensor, dim: Axes, keepdim: bool = False) -> Tensor:
    top = x.amax(_axes(x, dim), keepdim=True)
    total = _sum((x - top).exp(), dim, True).log() + top
    return total if keepdim else total.sum(_axes(x, dim))


def _clean(
    x: Tensor,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Tensor:
    kind = torch.finfo(x.dtype)
    above = kind.max if posinf is None else posinf
    below = kind.min if neginf is None else neginf
    x = torch.where(x == math.inf, above, torch.where(x == -math.inf, below, x))
    return torch.where(torch.isnan(x), 0.0 if nan is None else nan, x)


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    return torch.where(x * beta > threshold, x, torch.log1p((x * beta).exp()) / beta)


def _elu(x: Tensor, alpha: float = 1.0, scale: float = 1.0, inside: float = 1.0) -> Tensor:
    return torch.where(x > 0, x * scale, torch.expm1(x * inside) * (alpha * scale))


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "none":
        return 0.5 * x * (1.0 + torch.erf(x * ROOT_HALF))
    inner = ROOT_TWO_OVER_PI * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1.0 + torch.tanh(inner))


def _logit(x: Tensor) -> Tensor:
    return (x / (1.0 - x)).log()


def _log_add_exp(a: Tensor, b: Tensor) -> Tensor:
    return torch.maximum(a, b) + torch.log1p((-(a - b).abs()).exp())


def _hardsigmoid(x: Tensor) -> Tensor:
    return torch.clamp(x + 3.0, 0.0, 6.0) / 6.0


def _added(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """A matrix product and something else: addmm, addmv, baddbmm."""
    return beta * x + alpha * torch.matmul(a, b)


def _fma(a: Tensor, b: Tensor, c: Tensor, *, value: Number = 1.0) -> Tensor:
    return a + value * b * c


def _addcdiv(a: Tensor, b: Tensor, c: Tensor, *, value: Number = 1.0) -> Tensor:
    return a + value * (b / c)


def _masked_fill(x: Tensor, mask: Tensor, value: Number) -> Tensor:
    return torch.where(mask, torch.as_tensor(value, dtype=x.dtype), x)


def _shrunk(x: Tensor, by: float, soft: bool) -> Tensor:
    return torch.where(x.abs() > by, x - by * torch.sign(x) if soft else x, 0.0 * x)


COMPOSED: dict[str, Callable[..., Tensor]] = {
    "addcdiv": _addcdiv,
    "addcmul": _fma,
    "addmm": _added,
    "addmv": _added,
    "baddbmm": _added,
    "count_nonzero": lambda x, dim=None: _sum((x != 0).to(torch.int64), dim, False),
    "dot": lambda a, b: (a * b).sum(),
    "elu": _elu,
    "frac": lambda x: x - x.trunc(),
    "gelu": _gelu,
    "hardsigmoid": _hardsigmoid,
    "hardswish": lambda x: x * _hardsigmoid(x),
    "hardshrink": lambda x, by=0.5: _shrunk(x, by, False),
    "heaviside": lambda x, at_zero: torch.where(x == 0, at_zero, (x > 0).to(x.dtype)),
    "hypot": lambda a, b: (a * a + b * b).sqrt(),
    "leaky_relu": lambda x, slope=0.01: torch.where(x > 0, x, x * slope),
    "lerp": lambda a, b, weight: a + weight * (b - a),
    "linalg_vector_norm": _norm,
    "_log_softmax": _log_softmax,
    "logaddexp": _log_add_exp,
    "logit": lambda x, eps=None: _logit(x if eps is None else x.clamp(eps, 1.0 - eps)),
    "logsumexp": _log_sum_exp,
    "masked_fill": _masked_fill,
    "mish": lambda x: x * torch.tanh(_softplus(x)),
    "mv": lambda a, b: torch.mm(a, b.unsqueeze(1)).squeeze(1),
    "nan_to_num": _clean,
    "norm": lambda x, p=2.0, dim=None, keepdim=False, **_: _norm(x, p or 2.0, dim, keepdim),
    "silu": lambda x: x * torch.sigmoid(x),
    "_softmax": _softmax,
    "softplus": _softplus,
    "softshrink": lambda x, by=0.5: _shrunk(x, by, True),
    "std": _deviation,
    "threshold": lambda x, at, value: torch.where(x > at, x, value),
    "var": _variance,
    "xlogy": lambda a, b: torch.where(a == 0, 0.0 * a, a * torch.log(b)),
}
