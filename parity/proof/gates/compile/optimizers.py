"""Steps of our optimizer classes, for the programs that only they launch.

One step for each choice that reaches a kernel as a compile-time value: kind of norm, rule of the
loss scale, inner optimizer, dtypes, `contract.compat.Compat`. Nothing is computed: see
`variants.recorded`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from twinstep.contract.compat import CORRECT, Compat
from twinstep.fast.optimizers.apex_lamb import FusedLAMB
from twinstep.fast.optimizers.bf16 import BF16Optimizer
from twinstep.fast.optimizers.fp16 import FP16Optimizer
from twinstep.fast.optimizers.fp16_unfused import FP16UnfusedOptimizer
from twinstep.fast.optimizers.fused_adam import FusedAdam
from twinstep.fast.optimizers.fused_lamb import FusedLamb
from twinstep.fast.optimizers.scalers import DynamicLossScale, LossScale, StaticLossScale
from twinstep.parity.ranks.world import World

Step = Callable[[], None]
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
SHAPES = ((33,), (4, 8), (34,))


def steps() -> Iterator[tuple[str, Step]]:
    """Name of a class, and what builds one and takes a step; each builds everything anew."""
    for dtype, compat in itertools.product((FULL, HALF, BRAIN), (CORRECT, Compat.deepspeed())):
        yield "FusedAdam", partial(_step_plain, partial(FusedAdam, compat=compat), dtype)
    yield "FusedLamb", partial(_step_plain, FusedLamb, BRAIN)
    yield "FusedLAMB", partial(_step_plain, FusedLAMB, BRAIN)
    for outer, inner in itertools.product((FP16Optimizer, FP16UnfusedOptimizer), (_adam, _lamb)):
        for arguments in _fp16_arguments():
            yield outer.__name__, partial(_step_fp16, outer, inner, arguments)
    choices = (1.0, 2.0, math.inf), (FULL, BRAIN), (1, 2)
    for norm_type, accumulation, groups in itertools.product(*choices):
        arguments = {"norm_type": norm_type, "grad_acc_dtype": accumulation, "clip_grad": 0.5}
        yield "BF16Optimizer", partial(_step_bf16, groups, True, arguments)
    yield "BF16Optimizer", partial(_step_bf16, 2, False, {})


def _fp16_arguments() -> Iterator[dict[str, object]]:
    """One thing at a time: the scaler, the kind of norm, behaviour of upstream, the dtype."""
    rules = [DynamicLossScale(rule=rule) for rule in ("dynamic", "wrapper", "torch")]
    for scaler in (StaticLossScale(), *rules):
        yield {"loss_scale_config": scaler}
    for norm_type, count in itertools.product((1.0, 3.0, math.inf), (1, len(SHAPES))):
        yield {"loss_scale_config": _scaler(), "norm_type": norm_type, "tensors": count}
    yield {"loss_scale_config": _scaler(), "compat": Compat.deepspeed()}
    yield {"low_precision_dtype": BRAIN}
    yield {"loss_scale_config": _scaler(), "external": 8.0}
    for norm_type in (2.0, math.inf):
        yield {"loss_scale_config": _scaler(), "norm_type": norm_type, "over_ranks": True}


def _scaler() -> LossScale:
    return DynamicLossScale(rule="wrapper")


def _weights(dtype: torch.dtype, count: int = len(SHAPES)) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES[:count]]


def _sum(weights: list[nn.Parameter]) -> Tensor:
    return torch.stack([weight.float().sum() for weight in weights]).sum()


def _adam(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    return FusedAdam(weights)


def _lamb(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    return FusedLamb(weights)


def _step_plain(make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype) -> None:
    weights = _weights(dtype)
    optimizer = make(weights)
    _sum(weights).backward()  # type: ignore[no-untyped-call]  # torch's
    optimizer.step()


def _step_fp16(
    outer: type[FP16Optimizer] | type[FP16UnfusedOptimizer],
    inner: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    arguments: dict[str, object],
) -> None:
    given = dict(arguments)
    if given.pop("over_ranks", False):
        World(1).run(
            lambda rank: _step_fp16(
                outer, inner, {**given, "expert_groups": {"": rank.group("data")}}
            )
        )
        return
    external = given.pop("external", None)
    dtype = BRAIN if "low_precision_dtype" in given else HALF
    weights = _weights(dtype, int(str(given.pop("tensors", len(SHAPES)))))
    optimizer = outer(inner(weights), clip_grad=0.5, verbose=False, **given)  # type: ignore[arg-type]
    if external is not None:
        optimizer.override_loss_scale(float(str(external)))
    optimizer.backward(_sum(weights))
    optimizer.step()


def _step_bf16(groups: int, bias_correction: bool, arguments: dict[str, object]) -> None:
    weights = _weights(BRAIN, groups)
    one_each: list[dict[str, object]] = [{"params": [weight]} for weight in weights]
    inside = FusedAdam(one_each)
    for group in inside.param_groups:
        group["bias_correction"] = bias_correction
    names = {weight: f"p{index}" for index, weight in enumerate(weights)}
    optimizer = BF16Optimizer(inside, param_names=names, **arguments)  # type: ignore[arg-type]
    optimizer.backward(_sum(weights))
    optimizer.step()
