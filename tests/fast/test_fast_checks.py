"""Refusals before a launch, in one sentence with the values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from twinstep.fast.kernels import (
    accumulate,
    adam,
    cast,
    clip,
    loss_scale,
    pack,
    reduce,
    sgd,
    unscale,
)
from twinstep.fast.optimizers.scalers import LossScaling

Change = Callable[[dict[str, Any]], None]


def f64(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def adam_arguments() -> dict[str, Any]:
    """A call that would be launched: two tensors, the first of them empty."""
    lists = {
        name: [torch.zeros(0), torch.zeros(2, 3)]
        for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")
    }
    controls = {name: f64(0.5) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")}
    return {
        **lists,
        "copies": [],
        "steps": [torch.tensor(0), torch.tensor(1)],
        **controls,
        "factor": torch.tensor(1.0),
        "found_inf": torch.tensor(0.0),
        "bias_correction": True,
    }


def refused(kind: type[Exception], message: str, change: Change) -> Any:
    return pytest.param(kind, message, change, id=message[:40])


@pytest.mark.parametrize(
    ("kind", "message", "change"),
    [
        refused(
            ValueError,
            r"grads has 1 tensors, but should have 2, as many as params \[adam_step_\]",
            lambda a: a["grads"].pop(),
        ),
        refused(
            ValueError,
            r"copies has 1 tensors, but should have 2, as many as params",
            lambda a: a["copies"].append(torch.zeros(0)),
        ),
        refused(
            ValueError,
            r"steps has 1 tensors, but should have 2, as many as params",
            lambda a: a["steps"].pop(),
        ),
        refused(
            TypeError,
            r"grads\[1\] is float64, but should be float16 or bfloat16 or float32",
            lambda a: a["grads"].__setitem__(1, torch.zeros(2, 3, dtype=torch.float64)),
        ),
        refused(
            TypeError,
            r"exp_avgs\[1\] is bfloat16, but should be float32",
            lambda a: a["exp_avgs"].__setitem__(1, torch.zeros(2, 3, dtype=torch.bfloat16)),
        ),
        refused(
            ValueError,
            r"grads\[1\] has shape \(6,\), but should have \(2, 3\)",
            lambda a: a["grads"].__setitem__(1, torch.zeros(6)),
        ),
        refused(
            ValueError,
            r"params\[1\] has shape \(2, 3\) and strides \(1, 2\), but should be contiguous",
            lambda a: a["params"].__setitem__(1, torch.zeros(3, 2).t()),
        ),
        refused(
            ValueError,
            r"exp_avg_sqs\[0\] is on meta, but should be on cpu",
            lambda a: a["exp_avg_sqs"].__setitem__(0, torch.zeros(0, device="meta")),
        ),
        refused(
            TypeError,
            r"lr is float32, but should be float64",
            lambda a: a.__setitem__("lr", torch.tensor(0.5)),
        ),
        refused(
            ValueError,
            r"found_inf has shape \(1,\), but should be a 0-dim tensor",
            lambda a: a.__setitem__("found_inf", torch.zeros(1)),
        ),
        refused(
            TypeError,
            r"steps\[0\] is int32, but should be int64",
            lambda a: a["steps"].__setitem__(0, torch.tensor(0, dtype=torch.int32)),
        ),
    ],
)
def test_an_adam_step_refuses(kind: type[Exception], message: str, change: Change) -> None:
    arguments = adam_arguments()
    change(arguments)
    with pytest.raises(kind, match=message):
        adam.adam_step_(**arguments)


def test_the_unchanged_call_is_not_refused() -> None:
    adam.adam_step_(**adam_arguments())


def test_sgd_counts_its_optional_lists() -> None:
    with pytest.raises(ValueError, match=r"momentums has 1 tensors, but should have 2"):
        sgd.sgd_step_(
            [torch.zeros(1), torch.zeros(2)],
            [torch.zeros(1), torch.zeros(2)],
            [torch.zeros(1)],
            [],
            [torch.tensor(0), torch.tensor(0)],
            lr=f64(0.1),
            momentum=f64(0.9),
            dampening=f64(0.0),
            weight_decay=f64(0.0),
            factor=torch.tensor(1.0),
            found_inf=torch.tensor(0.0),
            nesterov=False,
        )


def test_the_small_operations_check_their_lists() -> None:
    strided = torch.zeros(4, 4)[:, :2]
    flag = {"inv_scale": torch.tensor(1.0), "found_inf": torch.tensor(0.0)}
    with pytest.raises(ValueError, match=r"grads\[0\] has shape .* \[unscale_\]"):
        unscale.unscale_([strided], **flag)
    with pytest.raises(TypeError, match=r"grads\[0\] is int64"):
        reduce.global_norm_([torch.tensor([1])], norm=f64(0.0), found_inf=torch.tensor(0.0))
    with pytest.raises(ValueError, match=r"copies has 0 tensors, but should have 1"):
        cast.cast_copy_([torch.zeros(1)], [])
    with pytest.raises(ValueError, match=r"grads has 1 tensors, but should have 0"):
        accumulate.accumulate_([], [torch.zeros(1)])


def test_controls_are_checked_by_the_dtype_their_name_stands_for() -> None:
    with pytest.raises(TypeError, match=r"norm is float64, but should be float32"):
        clip.clip_coefficient_(norm=f64(1.0), max_norm=f64(1.0), factor=torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"inv_scale is float64, but should be float32"):
        unscale.unscale_([torch.zeros(1)], inv_scale=f64(1.0), found_inf=torch.tensor(0.0))
    with pytest.raises(TypeError, match=r"growth_tracker is float32, but should be int64"):
        loss_scale.update_scale_torch_(
            scale=f64(1.0),
            growth_tracker=torch.tensor(0.0),
            found_inf=torch.tensor(0.0),
            growth_factor=f64(2.0),
            backoff_factor=f64(0.5),
            growth_interval=torch.tensor(2),
        )


@pytest.mark.parametrize(
    ("flat", "slot", "message"),
    [
        ([], 1, r"flat has 0 tensors, but should have 1"),
        ([torch.zeros(18)], 0, r"slot=0, but should be at least 1 element"),
        ([torch.zeros(18)], 16, r"flat\[0\] has 18 elements, but should have at least 19 for 2 "),
        ([torch.zeros(40)[::2]], 16, r"flat\[0\] has shape \(20,\) and strides \(2,\)"),
    ],
)
def test_packing_needs_room(flat: list[Tensor], slot: int, message: str) -> None:
    tensors = [torch.zeros(5), torch.zeros(3)]
    with pytest.raises(ValueError, match=message):
        pack.flatten_(tensors, flat, slot=slot)
    with pytest.raises(ValueError, match=message):
        pack.unflatten_(flat, tensors, slot=slot)


def test_packing_needs_one_dtype() -> None:
    with pytest.raises(TypeError, match=r"tensors\[0\] is float16, but should be float32"):
        pack.flatten_([torch.zeros(1, dtype=torch.float16)], [torch.zeros(1)], slot=1)


def test_an_unknown_rule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"rule='dynamo', but should be one of static, dynamic,"):
        LossScaling(rule="dynamo")
    with pytest.raises(ValueError, match=r"scale_window=0, but should be at least 1"):
        LossScaling(scale_window=0)
