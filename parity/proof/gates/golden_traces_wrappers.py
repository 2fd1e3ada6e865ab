"""Replaying whole steps of mixed-precision optimizers: four weights, true gradient 1.

What is done to the weights is what `golden.record_wrappers` did to them with DeepSpeed's classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from twinstep.contract.compat import Compat
from twinstep.golden.trace import Header, Step
from twinstep.reference.optimizers.bf16 import BF16Optimizer
from twinstep.reference.optimizers.fp16 import FP16Optimizer
from twinstep.reference.optimizers.fp16_unfused import FP16UnfusedOptimizer

Wrapper = FP16Optimizer | FP16UnfusedOptimizer | BF16Optimizer
LOSS = {"g": 1.0, "o": torch.inf, "z": 0.0}
RULES = ("flat_step", "unfused_step", "lamb_step", "bf16_step")


class Divided(torch.optim.SGD):
    """Stands in for LAMB: writes down what its gradients are to be divided by."""

    divisor = 0.0

    def step(  # type: ignore[override]
        self,
        closure: None = None,
        *,
        grads: Sequence[Sequence[Tensor]] | None = None,
        output_params: Sequence[Sequence[Tensor]] | None = None,
        scale: Tensor | None = None,
    ) -> None:
        """Move nothing."""
        del closure, grads, output_params
        self.divisor = 0.0 if scale is None else scale.item()


def whole_steps(header: Header, compat: Compat) -> list[Step]:
    """Run the reference through the steps of a trace."""
    given = header.constants
    dtype = torch.bfloat16 if header.rule == "bf16_step" else torch.float16
    weights = nn.Parameter(torch.ones(4, dtype=dtype))
    kind = Divided if header.rule == "lamb_step" else torch.optim.SGD
    inside = kind([weights], lr=1.0, weight_decay=float(given["weight_decay"]))
    optimizer = _built(header, inside, weights, compat)
    if given["external"] and not isinstance(optimizer, BF16Optimizer):
        optimizer.override_loss_scale(float(given["external"]))
    (master,) = inside.param_groups[0]["params"]
    return [_step(optimizer, inside, weights, master, letter) for letter in header.steps]


def _built(
    header: Header, inside: torch.optim.Optimizer, weights: nn.Parameter, compat: Compat
) -> Wrapper:
    given = header.constants
    clip, norm_type = float(given["clip_grad"]), float(given["norm_type"])
    if header.rule == "bf16_step":
        return BF16Optimizer(
            inside, param_names={weights: "p0"}, clip_grad=clip, norm_type=norm_type, compat=compat
        )
    scaling = {
        "init_scale": float(header.start["scale"]),
        "scale_window": float(given["scale_window"]),
        "min_scale": float(given["min_scale"]),
    }
    if header.rule == "flat_step":
        return FP16Optimizer(
            inside,
            dynamic_loss_scale=True,
            dynamic_loss_args=scaling,
            clip_grad=clip,
            norm_type=norm_type,
            verbose=False,
            compat=compat,
        )
    return FP16UnfusedOptimizer(
        inside,
        dynamic_loss_scale=True,
        dynamic_loss_args=scaling,
        clip_grad=clip,
        norm_type=norm_type,
        verbose=False,
        fused_lamb_legacy=header.rule == "lamb_step",
        compat=compat,
    )


def _step(
    optimizer: Wrapper,
    inside: torch.optim.Optimizer,
    weights: nn.Parameter,
    master: Tensor,
    letter: str,
) -> Step:
    before = master.detach().clone()
    optimizer.zero_grad()
    optimizer.backward(weights.float().sum() * LOSS[letter])
    optimizer.step()
    moved = (before - master.detach())[0].item()
    scale = 1.0 if isinstance(optimizer, BF16Optimizer) else optimizer.loss_scaler.loss_scale
    return {
        "scale": scale,
        "applied": inside.divisor if isinstance(inside, Divided) else moved,
        "weight": master.detach()[0].item(),
        "norm": 0.0 if optimizer.overflow else optimizer.get_global_norm(),
        "skipped": optimizer.overflow,
    }
