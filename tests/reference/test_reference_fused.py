"""Steps of the reference's FusedAdam and FusedLamb are calls of their operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.battery import MIXED, fill, parameters
from twinstep.parity.cases.fixed_inputs import bits
from twinstep.reference.adam import adam_step, adamw_step
from twinstep.reference.arithmetic import float64
from twinstep.reference.lamb import lamb_step
from twinstep.reference.optimizers.fused_adam import FusedAdam
from twinstep.reference.optimizers.fused_lamb import FusedLamb

Step = Callable[..., tuple[list[Tensor], ...]]
HYPER = {"lr": 0.0123, "beta1": 0.87, "beta2": 0.993, "eps": 3e-4, "weight_decay": 0.07}
OPTIONS = {"lr": 0.0123, "betas": (0.87, 0.993), "eps": 3e-4, "weight_decay": 0.07}
BOUNDS = {"max_coeff": 10.0, "min_coeff": 0.01}
ROWS: dict[str, tuple[Any, Step, dict[str, bool], dict[str, Any]]] = {
    "adam": (FusedAdam, adam_step, {"adam_w_mode": False}, {}),
    "adamw": (FusedAdam, adamw_step, {"adam_w_mode": True}, {}),
    "lamb": (FusedLamb, lamb_step, {}, {**BOUNDS, "eps_inside_sqrt": False}),
    "lamb, eps inside": (
        FusedLamb,
        lamb_step,
        {"eps_inside_sqrt": True},
        {**BOUNDS, "eps_inside_sqrt": True},
    ),
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", MIXED, ids=str)
def test_three_steps_are_three_calls_of_the_operation(dtype: torch.dtype, row: str) -> None:
    cls, operation, options, more = ROWS[row]
    params = parameters((5, 9), dtype)
    optimizer = cls(params, **OPTIONS, **options)
    controls = {
        name: float64(value) if isinstance(value, float) else value
        for name, value in {**HYPER, **more}.items()
    }
    p = [param.detach().clone() for param in params]
    m, v = ([torch.zeros(param.numel()) for param in params] for _ in range(2))
    steps = [torch.tensor(0), torch.tensor(0)]
    for seed in (10, 20, 30):
        fill(params, seed)
        grads = [param.grad for param in params]
        optimizer.step()
        p, m, v, _, steps = operation(
            p, grads, m, v, [], steps, **controls,
            factor=torch.tensor(1.0), found_inf=torch.tensor(0.0), bias_correction=True,
        )  # fmt: skip
    for index, param in enumerate(params):
        state = optimizer.state[param]
        assert bits(param.detach()) == bits(p[index])
        assert bits(state["exp_avg"]) == bits(m[index])
        assert bits(state["exp_avg_sq"]) == bits(v[index])
        assert state["step"].item() == 3
