"""Record whole steps of DeepSpeed's mixed-precision optimizers: four weights, true gradient 1.

The optimizer inside is torch's plain gradient descent with learning rate 1, so that a step moves
the masters by the gradient that was applied. On LAMB's path it only writes down what it is to
divide by.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import cast

from twinstep.golden.record_deepspeed import deepspeed_version, header_of
from twinstep.golden.sequences import Situation
from twinstep.golden.trace import Step, Trace

FLAT = "deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer"
UNFUSED = "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer"
BF16 = "deepspeed.runtime.bf16_optimizer.BF16_Optimizer"
SUBJECTS = {"flat_step": FLAT, "unfused_step": UNFUSED, "lamb_step": UNFUSED, "bf16_step": BF16}
DIFFERS = {
    "external_scale_stays": "edge LS-2: by default what multiplied the loss is divided out",
    "growth_halves_the_gradient": "edge UF-1: by default the norm is that of the true gradients",
    "divisor_of_lamb": "edge UF-1: by default the norm is that of the true gradients",
    "construction_decays": "edge FP-1: by default construction changes nothing",
}


def record(situation: Situation) -> Trace:
    """Run DeepSpeed's own class through a situation."""
    from dataclasses import replace

    version = deepspeed_version()
    run = _bf16 if situation.rule == "bf16_step" else _fp16
    start = {"scale": situation.scale}
    header = header_of(situation, version, SUBJECTS[situation.rule], start)
    differs = DIFFERS.get(situation.name, "")
    return Trace(header=replace(header, differs=differs), steps=run(situation))


def _fp16(situation: Situation) -> list[Step]:
    import torch

    given = situation.constants
    lamb = situation.rule == "lamb_step"

    class Divided(torch.optim.SGD):
        """Writes down what it is to divide by."""

        divisor = 0.0

        def step(self, closure: object = None, **given: object) -> None:  # type: ignore[override]
            del closure
            self.divisor = cast(float, given.get("scale", 0.0))

    weights = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    decay = float(given.get("weight_decay", 0.0))
    kind = Divided if lamb else torch.optim.SGD
    inside = kind([weights], lr=1.0, weight_decay=decay)
    module, name = SUBJECTS[situation.rule].rsplit(".", 1)
    extra = {"fused_lamb_legacy": True} if lamb else {}
    scaling = {key: given[key] for key in ("scale_window", "min_scale")}
    optimizer = getattr(import_module(module), name)(
        inside,
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": situation.scale, **scaling},
        clip_grad=given["clip_grad"],
        verbose=False,
        **extra,
    )
    if given["external"]:
        optimizer.override_loss_scale(given["external"])
    flat = situation.rule == "flat_step"
    master = optimizer.fp32_groups_flat[0] if flat else optimizer.fp32_groups[0][0]
    steps: list[Step] = []
    for letter in situation.steps:
        before = master.detach().clone()
        optimizer.zero_grad()
        loss = weights.float().sum()
        optimizer.backward(loss * torch.inf if letter == "o" else loss)
        skipped = bool(optimizer.step())
        moved = float((before - master.detach())[0])
        steps.append(
            {
                "scale": float(optimizer.loss_scale_config.cur_scale),
                "applied": float(getattr(inside, "divisor", 0.0)) if lamb else moved,
                "weight": float(master[0]),
                "norm": 0.0 if skipped else float(optimizer._global_grad_norm),
                "skipped": skipped,
            }
        )
    return steps


def _bf16(situation: Situation) -> list[Step]:
    import torch

    given = situation.constants
    weights = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    module, name = BF16.rsplit(".", 1)
    optimizer = getattr(import_module(module), name)(
        torch.optim.SGD([weights], lr=1.0),
        {weights: "p0"},
        SimpleNamespace(enabled=True, immediate_grad_update=False),
        clip_grad=given["clip_grad"],
        norm_type=given["norm_type"],
        dp_process_group=torch.distributed.group.WORLD,
        grad_acc_dtype=torch.float32,
    )
    (master,) = optimizer.fp32_groups_flat_partition
    steps: list[Step] = []
    for letter in situation.steps:
        before = master.detach().clone()
        optimizer.zero_grad()
        loss = weights.float().sum() * {"g": 1.0, "o": torch.inf, "z": 0.0}[letter]
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.update_hp_grads()
        optimizer.step()
        skipped = bool(optimizer.overflow)
        steps.append(
            {
                "scale": 1.0,
                "applied": float((before - master.detach())[0]),
                "weight": float(master[0]),
                "norm": 0.0 if skipped else float(optimizer._global_grad_norm),
                "skipped": skipped,
            }
        )
    return steps
