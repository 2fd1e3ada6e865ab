"""Whole steps replayed: four weights, true gradient 1, plain gradient descent with learning rate 1.

What is done to the weights is what `golden.record_wrappers` did to them with DeepSpeed's classes.
The reference wraps torch's own optimizer; the fast side its `FusedAdam`, whose kernels production
runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from twinstep.contract.compat import Compat
from twinstep.golden.trace import Header, Step
from twinstep.parity.proof.golden.sides import CLASSES, Divided, descent

LOSS = {"g": 1.0, "o": torch.inf, "z": 0.0}
KINDS = {
    "wrapper_step": "flat",
    "flat_step": "flat",
    "unfused_step": "unfused",
    "lamb_step": "unfused",
    "bf16_step": "bf16",
}


def whole_steps(side: str, header: Header, compat: Compat) -> list[Step]:
    """Run a side's wrapper through the steps of a trace."""
    given = header.constants
    dtype = torch.bfloat16 if header.rule == "bf16_step" else torch.float16
    weights = nn.Parameter(torch.ones(4, dtype=dtype))
    decay = float(given.get("weight_decay", 0.0))
    if header.rule == "lamb_step":
        inside: torch.optim.Optimizer = Divided([weights], lr=1.0, weight_decay=decay)
    elif side == "reference":
        inside = torch.optim.SGD([weights], lr=1.0, weight_decay=decay)
    else:
        inside = descent(side, [{"params": [weights], "lr": 1.0, "weight_decay": decay}])
    optimizer = _built(side, header, inside, weights, compat)
    if given.get("external"):
        optimizer.override_loss_scale(float(given["external"]))
    (master,) = inside.param_groups[0]["params"]
    return [_step(header, optimizer, inside, weights, master, letter) for letter in header.steps]


def _built(
    side: str,
    header: Header,
    inside: torch.optim.Optimizer,
    weights: nn.Parameter,
    compat: Compat,
) -> Any:
    given, kind = header.constants, KINDS[header.rule]
    options: dict[str, Any] = {
        "clip_grad": float(given.get("clip_grad", 0.0)),
        "norm_type": float(given.get("norm_type", 2.0)),
        "compat": compat,
    }
    if kind == "bf16":
        return CLASSES[side][kind](inside, param_names={weights: "p0"}, **options)
    options["dynamic_loss_args"] = {
        "init_scale": float(header.start["scale"]),
        "scale_window": float(given["scale_window"]),
        "min_scale": float(given["min_scale"]),
    }
    if header.rule == "lamb_step":
        options["fused_lamb_legacy"] = True
    return CLASSES[side][kind](inside, dynamic_loss_scale=True, verbose=False, **options)


def _step(
    header: Header,
    optimizer: Any,
    inside: torch.optim.Optimizer,
    weights: nn.Parameter,
    master: Tensor,
    letter: str,
) -> Step:
    before = master.detach().clone()
    optimizer.zero_grad()
    optimizer.backward(weights.float().sum() * LOSS[letter])
    optimizer.step()
    skipped = bool(optimizer.overflow)
    moved = (before - master.detach())[0].item()
    scale = 1.0 if KINDS[header.rule] == "bf16" else optimizer.loss_scaler.loss_scale
    step: dict[str, float | bool] = {
        "scale": scale,
        "applied": inside.divisor if isinstance(inside, Divided) else moved,
        "weight": master.detach()[0].item(),
        "norm": 0.0 if skipped else optimizer.get_global_norm(),
        "skipped": skipped,
    }
    if header.rule == "wrapper_step":
        del step["weight"]
    return step
