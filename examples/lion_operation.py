"""Lion as a new operation: its reference, what it writes, its laws; a right and a wrong kernel.

parity check lion_operation.py
"""

import torch

from twinstep.parity import register, register_operation
from twinstep.parity.operations.arguments import COPIES, EXP_AVGS, GRADS, PARAMS, STEP_LAWS, STEPS
from twinstep.parity.operations.combinations import step_combinations
from twinstep.parity.operations.controls import BETA1, BETA2, FACTOR, LR, SKIP, WEIGHT_DECAY
from twinstep.parity.operations.operation import Operation


def fp32(x):
    """Formed in float64, rounded once."""
    return x.to(torch.float32)


def lion_one(p, g, m, factor, lr, beta1, beta2, weight_decay):
    """New weight before it is rounded to storage, and new momentum; all fp32."""
    g, p = fp32(g) * factor, fp32(p)
    c = fp32(beta1) * m + fp32(1 - beta1) * g
    direction = torch.sign(c) + fp32(weight_decay) * p
    return p - fp32(lr) * direction, fp32(beta2) * m + fp32(1 - beta2) * g


def lion_step(
    params, grads, exp_avgs, copies, steps, *, lr, beta1, beta2, weight_decay, factor, found_inf
):
    """Mutates nothing; returns one entry for each written argument, in their order."""
    if found_inf.item() != 0:
        return tuple([x.clone() for x in row] for row in (params, exp_avgs, copies, steps))
    new = [
        lion_one(p, g, m, factor, lr, beta1, beta2, weight_decay)
        for p, g, m in zip(params, grads, exp_avgs, strict=True)
    ]
    out_params = [w.to(p.dtype) for (w, _), p in zip(new, params, strict=True)]
    out_copies = [w.to(c.dtype) for (w, _), c in zip(new, copies, strict=False)]
    return out_params, [m for _, m in new], out_copies, [step + 1 for step in steps]


register_operation(
    Operation(
        name="lion_step",
        summary="Lion: the sign of an interpolated momentum, decoupled weight decay.",
        equations=(
            "g = grad factor",
            "c = beta1 m + (1 - beta1) g",
            "p = p - lr (sign(c) + weight_decay p)",
            "m = beta2 m + (1 - beta2) g",
        ),
        lists=(PARAMS, GRADS, EXP_AVGS, COPIES, STEPS),
        controls=(LR, BETA1, BETA2, WEIGHT_DECAY, FACTOR, SKIP),
        writes=("params", "exp_avgs", "copies", "steps"),
        reference=lion_step,
        combinations=step_combinations("exp_avgs"),
        laws=STEP_LAWS,
    )
)


@register("lion_step", name="right_lion", arithmetic="exact", dtypes=("fp16", "bf16", "fp32"))
def right_lion(
    params, grads, exp_avgs, copies, steps, *, lr, beta1, beta2, weight_decay, factor, found_inf
):
    """Writes in place and returns nothing."""
    if found_inf.item() != 0:
        return
    for i, (p, g, m) in enumerate(zip(params, grads, exp_avgs, strict=True)):
        w, momentum = lion_one(p, g, m, factor, lr, beta1, beta2, weight_decay)
        p.copy_(w)
        m.copy_(momentum)
        steps[i] += 1
        if copies:
            copies[i].copy_(w)


@register("lion_step", name="wrong_lion", arithmetic="exact", dtypes=("fp16", "bf16", "fp32"))
def wrong_lion(
    params, grads, exp_avgs, copies, steps, *, lr, beta1, beta2, weight_decay, factor, found_inf
):
    """Takes the sign of the new momentum, which beta2 has made, instead of the interpolation."""
    if found_inf.item() != 0:
        return
    for i, (p, g, m) in enumerate(zip(params, grads, exp_avgs, strict=True)):
        w, momentum = lion_one(p, g, m, factor, lr, beta2, beta2, weight_decay)
        p.copy_(w)
        m.copy_(momentum)
        steps[i] += 1
        if copies:
            copies[i].copy_(w)
