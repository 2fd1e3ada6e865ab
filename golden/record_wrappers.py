"""Record whole steps of DeepSpeed's mixed-precision optimizers: four weights, true gradient 1.

The inner optimizer is torch's plain gradient descent with learning rate 1, so that a step moves
the masters by the gradient that was applied. On LAMB's path it only writes down its divisor.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from twinstep.golden.record_deepspeed import (
    BF16,
    FLAT,
    UNFUSED,
    bf16_optimizer,
    class_of,
    deepspeed_version,
    header_of,
)
from twinstep.golden.sequences import Situation
from twinstep.golden.trace import Step, Trace

if TYPE_CHECKING:
    import torch

SUBJECTS = {
    "wrapper_step": FLAT,
    "flat_step": FLAT,
    "unfused_step": UNFUSED,
    "lamb_step": UNFUSED,
    "bf16_step": BF16,
}
GRADIENTS = {"g": 1.0, "o": float("inf"), "z": 0.0}


def record(situation: Situation) -> Trace:
    """Run DeepSpeed's own class through a situation."""
    start = {"scale": situation.scale}
    header = header_of(situation, deepspeed_version(), SUBJECTS[situation.rule], start)
    return Trace(header=header, steps=_steps(situation))


def _steps(situation: Situation) -> list[Step]:
    import torch

    bf16, lamb = situation.rule == "bf16_step", situation.rule == "lamb_step"
    dtype = torch.bfloat16 if bf16 else torch.float16
    weights = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    inner = _inner(situation, weights)
    optimizer, master = _optimizer(situation, inner, weights)
    steps: list[Step] = []
    for letter in situation.steps:
        before = master.detach().clone()
        optimizer.zero_grad()
        loss = weights.float().sum() * GRADIENTS[letter]
        if bf16:
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.update_hp_grads()
        else:
            optimizer.backward(loss)
        optimizer.step()
        skipped = bool(optimizer.overflow)
        moved = float((before - master.detach())[0])
        step: dict[str, float | bool] = {
            "scale": 1.0 if bf16 else float(optimizer.loss_scale_config.cur_scale),
            "applied": float(vars(inner)["divisor"]) if lamb else moved,
            "weight": float(master[0]),
            # A skipped step leaves the norm of the step before it; there is none to record.
            "norm": 0.0 if skipped else float(optimizer._global_grad_norm),
            "skipped": skipped,
        }
        if situation.rule == "wrapper_step":
            del step["weight"]
        steps.append(step)
    return steps


def _inner(situation: Situation, weights: torch.nn.Parameter) -> torch.optim.Optimizer:
    import torch

    class Divided(torch.optim.SGD):
        """Writes down its divisor; moves nothing."""

        def step(self, closure: object = None, **given: object) -> None:  # type: ignore[override]
            del closure
            self.divisor = cast(float, given.get("scale", 0.0))

    decay = float(situation.constants.get("weight_decay", 0.0))
    if situation.rule != "lamb_step":
        return torch.optim.SGD([weights], lr=1.0, weight_decay=decay)
    divided = Divided([weights], lr=1.0, weight_decay=decay)
    divided.divisor = 0.0
    return divided


def _optimizer(
    situation: Situation, inner: torch.optim.Optimizer, weights: torch.nn.Parameter
) -> tuple[SimpleNamespace, torch.Tensor]:
    """DeepSpeed's object, and its master weights."""
    rule, given = situation.rule, situation.constants
    if rule == "bf16_step":
        options = {name: given[name] for name in ("clip_grad", "norm_type")}
        optimizer = bf16_optimizer(inner, {weights: "p0"}, **options)
        return optimizer, optimizer.fp32_groups_flat_partition[0]
    optimizer = class_of(SUBJECTS[rule])(
        inner,
        dynamic_loss_scale=True,
        dynamic_loss_args={
            "init_scale": situation.scale,
            "scale_window": given["scale_window"],
            "min_scale": given["min_scale"],
        },
        clip_grad=given.get("clip_grad", 0.0),
        verbose=False,
        **({"fused_lamb_legacy": True} if rule == "lamb_step" else {}),
    )
    if given.get("external"):
        optimizer.override_loss_scale(given["external"])
    unfused = SUBJECTS[rule] == UNFUSED
    return optimizer, optimizer.fp32_groups[0][0] if unfused else optimizer.fp32_groups_flat[0]
