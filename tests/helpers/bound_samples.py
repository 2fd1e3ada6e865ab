"""A call of each operator that bounds are known for, and what its operands may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sample:
    """A call of an operator.

    Attributes:
        call: takes its operands.
        domains: of the operands.
    """

    call: Callable[..., object]
    domains: tuple[tuple[float, float], ...] = ((-3.0, 3.0),)


ANY, POSITIVE, UNIT, PART = (-3.0, 3.0), (0.25, 3.0), (-0.9, 0.9), (0.1, 0.9)


def one(call: Callable[..., object], domain: tuple[float, float] = ANY) -> Sample:
    return Sample(call, (domain,))


def two(call: Callable[..., object], *domains: tuple[float, float]) -> Sample:
    return Sample(call, domains or (ANY, ANY))


def three(call: Callable[..., object]) -> Sample:
    return Sample(call, (ANY, ANY, POSITIVE))


def by_name(*names: str, domain: tuple[float, float] = ANY) -> dict[str, Sample]:
    return {name: one(getattr(torch, name), domain) for name in names}


def of_two(*names: str, domains: tuple[tuple[float, float], ...] = (ANY, ANY)) -> dict[str, Sample]:
    return {name: Sample(getattr(torch, name), domains) for name in names}


HALF = torch.tensor([0, 2, 3])
SAMPLES: dict[str, Sample] = {
    **by_name("abs", "neg", "sign", "sgn", "floor", "ceil", "trunc", "round", "relu", "frac"),
    **by_name("exp", "exp2", "expm1", "sinh", "cosh", "sin", "cos", "tanh", "sigmoid", "erf"),
    **by_name("erfc", "atan", "asinh", "tan", "isnan", "isinf", "signbit", "clone", "detach"),
    **by_name("sum", "mean", "prod", "amax", "amin", "max", "min", "count_nonzero", "t"),
    **by_name("zeros_like", "ones_like", "nan_to_num", "tril", "triu"),
    **by_name("sqrt", "rsqrt", "reciprocal", "log", "log2", "log10", "log1p", domain=POSITIVE),
    **by_name("asin", "acos", "atanh", domain=UNIT),
    **by_name("logit", domain=PART),
    **by_name("acosh", domain=(1.1, 4.0)),
    **of_two("add", "sub", "rsub", "mul", "maximum", "minimum", "fmax", "fmin", "copysign"),
    **of_two("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor"),
    **of_two("hypot", "atan2", "logaddexp", "heaviside"),
    **of_two("div", "fmod", "remainder", "floor_divide", domains=(ANY, POSITIVE)),
    **of_two("pow", "xlogy", domains=(POSITIVE, POSITIVE)),
    **{name: three(getattr(torch, name)) for name in ("addcmul", "addcdiv", "lerp")},
    "_log_softmax": one(lambda x: torch.log_softmax(x, 1)),
    "_softmax": one(lambda x: torch.softmax(x, 1)),
    "_unsafe_view": one(lambda x: torch.ops.aten._unsafe_view(x, [3, 8])),
    "addmm": Sample(lambda a, b, c: torch.addmm(a[:, :4], b, c.t()), (ANY, ANY, ANY)),
    "addmv": Sample(lambda a, b, c: torch.addmv(a[:, 0], b, c[0]), (ANY, ANY, ANY)),
    "alias": one(torch.ops.aten.alias),
    "all": one(lambda x: (x > -1).all(1)),
    "any": one(lambda x: (x > 1).any(1)),
    "argmax": one(lambda x: x.argmax(1)),
    "argmin": one(lambda x: x.argmin(1)),
    "argsort": one(lambda x: torch.ops.aten.argsort(x, 1)),
    "baddbmm": Sample(
        lambda a, b, c: torch.baddbmm(a[None, :, :4], b[None], c.t()[None], alpha=2),
        (ANY, ANY, ANY),
    ),
    "bitwise_and": two(lambda a, b: (a > 0) & (b > 0)),
    "bitwise_not": one(lambda a: ~(a > 0)),
    "bitwise_or": two(lambda a, b: (a > 0) | (b > 0)),
    "bitwise_xor": two(lambda a, b: (a > 0) ^ (b > 0)),
    "bmm": two(lambda a, b: torch.bmm(a[None], b.t()[None])),
    "cat": two(lambda a, b: torch.cat([a, b], 1)),
    "clamp": two(lambda a, b: torch.stack([a.clamp(-1.0, 1.5), a.clamp(max=b, min=b - 1)])),
    "clamp_max": two(lambda a, b: a.clamp_max(b)),
    "clamp_min": one(lambda x: x.clamp_min(0.5)),
    "constant_pad_nd": one(lambda x: torch.nn.functional.pad(x, (1, 2), value=1.5)),
    "copy": two(torch.ops.aten.copy),
    "cumsum": one(lambda x: x.cumsum(1)),
    "diagonal": one(lambda x: x.diagonal()),
    "dot": two(lambda a, b: torch.dot(a[0], b[1])),
    "elu": one(lambda x: torch.nn.functional.elu(x, 0.7)),
    "empty_like": one(lambda x: torch.empty_like(x).fill_(0.5)),
    "expand": one(lambda x: x[:1].expand(3, 6)),
    "fill": one(lambda x: torch.ops.aten.fill(x, 0.5)),
    "flip": one(lambda x: x.flip(0)),
    "full_like": one(lambda x: torch.full_like(x, 0.25)),
    "gather": one(lambda x: x.gather(1, torch.zeros(4, 2, dtype=torch.int64))),
    "gelu": one(torch.nn.functional.gelu),
    "hardshrink": one(torch.nn.functional.hardshrink),
    "hardsigmoid": one(torch.nn.functional.hardsigmoid),
    "hardswish": one(torch.nn.functional.hardswish),
    "hardtanh": one(torch.nn.functional.hardtanh),
    "index": one(lambda x: x[:, HALF]),
    "index_put": two(lambda a, b: torch.ops.aten.index_put(a, [HALF], b[:3])),
    "index_select": one(lambda x: x.index_select(0, HALF)),
    "leaky_relu": one(torch.nn.functional.leaky_relu),
    "lift_fresh": one(torch.ops.aten.lift_fresh),
    "linalg_vector_norm": one(lambda x: torch.linalg.vector_norm(x, dim=1)),
    "logical_not": one(lambda x: torch.logical_not(x > 0)),
    "logsumexp": one(lambda x: x.logsumexp(1)),
    "masked_fill": two(lambda a, b: a.masked_fill(b > 0, 0.25)),
    "mish": one(torch.nn.functional.mish),
    "mm": two(lambda a, b: a @ b.t()),
    "mv": two(lambda a, b: torch.mv(a, b[0])),
    "new_empty": one(lambda x: x.new_empty(0)),
    "new_full": one(lambda x: x.new_full((2,), 0.5)),
    "new_ones": one(lambda x: x.new_ones(2)),
    "new_zeros": one(lambda x: x.new_zeros(2)),
    "norm": one(lambda x: torch.ops.aten.norm(x, 3.0)),
    "permute": one(lambda x: x.permute(1, 0)),
    "repeat": one(lambda x: x.repeat(2, 1)),
    "roll": one(lambda x: x.roll(1, 1)),
    "select": one(lambda x: x[2]),
    "select_scatter": two(lambda a, b: torch.select_scatter(a, b[0], 0, 1)),
    "silu": one(torch.nn.functional.silu),
    "slice": one(lambda x: x[:, 1:5:2]),
    "slice_scatter": two(lambda a, b: torch.slice_scatter(a, b[:2], 0, 0, 2)),
    "softplus": one(torch.nn.functional.softplus),
    "softshrink": one(torch.nn.functional.softshrink),
    "sort": one(lambda x: x.sort(1)),
    "split": one(lambda x: torch.ops.aten.split(x, 4, 1)),
    "split_with_sizes": one(lambda x: x.split([1, 5], 1)),
    "squeeze": one(lambda x: x[:1].squeeze(0)),
    "stack": two(lambda a, b: torch.stack([a, b])),
    "std": one(lambda x: x.std(1)),
    "threshold": one(lambda x: torch.nn.functional.threshold(x, 0.5, -1.0)),
    "topk": one(lambda x: x.topk(2, 1)),
    "transpose": one(lambda x: x.transpose(0, 1)),
    "unbind": one(lambda x: x.unbind(0)),
    "unfold": one(lambda x: x.unfold(1, 2, 2)),
    "unsqueeze": one(lambda x: x.unsqueeze(0)),
    "var": one(lambda x: x.var(1, correction=0)),
    "view": one(lambda x: x.view(3, 8)),
    "where": Sample(lambda a, b, c: torch.where(c > 1, a, b), (ANY, ANY, ANY)),
    "zero": one(torch.ops.aten.zero),
}
