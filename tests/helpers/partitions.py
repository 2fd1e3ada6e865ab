"""BF16Optimizer of either side over ranks: built, trained and looked at."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.helpers.sides import CLASSES
from twinstep.parity.cases.fixed_inputs import bits, moderate

BRAIN = torch.bfloat16


def built(
    side: str, sizes: tuple[int, ...] = (4, 0, 3, 5), **options: Any
) -> tuple[list[nn.Parameter], Any]:
    """Parameters of the same values on all ranks."""
    home = CLASSES[side]
    params = [nn.Parameter(moderate(size, size + 1, BRAIN)) for size in sizes]
    marks = options.pop("marks", lambda params: None)
    marks(params)
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.3}]
    groups[1] |= options.pop("second", {})
    inside = home["FusedAdam"](groups, lr=0.02, weight_decay=0.1)
    name = options.pop("name", "p")
    names = {p: f"{name}{place}" for place, p in enumerate(params)}
    return params, home["BF16Optimizer"](inside, param_names=names, **options)


def trained(params: list[nn.Parameter], optimizer: Any, steps: range, seed: int = 0) -> None:
    """Steps with numbered gradients."""
    for number in steps:
        for place, param in enumerate(params):
            param.grad = moderate(param.numel(), seed + 10 * number + place, BRAIN)
        optimizer.update_hp_grads(clear_lp_grads=True)
        optimizer.step()


def seen(params: list[nn.Parameter], optimizer: Any) -> list[object]:
    """Weights, whole masters and states, overflow and norm of the last step."""
    whole = [
        optimizer.get_full_hp_param(f"p{place}", key)
        for place in range(len(params))
        for key in (None, "exp_avg", "exp_avg_sq")
    ]
    found: list[object] = [bits(tensor.detach()) for tensor in (*params, *whole)]
    return [*found, optimizer.overflow, str(optimizer.get_global_norm())]
