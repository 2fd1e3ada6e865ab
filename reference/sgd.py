"""Stochastic gradient descent with momentum, dampening and Nesterov's look-ahead, one step.

Equations (Sutskever et al. 2013, in the form used by torch.optim.SGD):

    g = grad * factor
    g = g + wd p
    b = g                                at the first step of this parameter
    b = momentum b + (1 - dampening) g   later
    d = g + momentum b                   with nesterov, otherwise d = b
    p = p - lr d
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from twinstep.reference.arithmetic import fp32, one_minus
from twinstep.reference.parameters import Lists, for_each_parameter


def sgd_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentums: Sequence[Tensor],
    copies: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Tensor,
    momentum: Tensor,
    dampening: Tensor,
    weight_decay: Tensor,
    factor: Tensor,
    found_inf: Tensor,
    nesterov: bool,
) -> Lists:
    """One step of stochastic gradient descent on every parameter.

    Args:
        params: master weights (fp32), or fp16/bf16 weights without masters; any shapes.
        grads: fp32, fp16 or bf16, one per parameter.
        momentums: momentum buffers, fp32, one per parameter, or an empty list: then d = g.
        copies: low-precision model weights, one per parameter, or an empty list.
        steps: completed steps of each parameter, int64, shape ().
        lr: learning rate, float64, shape ().
        momentum: weight of the old buffer, float64, shape ().
        dampening: 1 minus the weight of the gradient in the buffer, float64, shape ().
        weight_decay: L2 coefficient, applied whatever its sign, float64, shape ().
        factor: multiplies every gradient (1/scale or less), fp32, shape ().
        found_inf: not 0 skips the step: every output has the bits of its input.
        nesterov: look ahead along the new buffer; without momentum buffers it has no effect.

    Returns:
        New params, momentums, copies, steps. Nothing is mutated. Each parameter and each copy is
        rounded once, from the same fp32 result.
    """
    lr, mu, wd, c = fp32(lr), fp32(momentum), fp32(weight_decay), one_minus(dampening)

    def update(t: int, p: Tensor, g: Tensor, b: Tensor | None = None) -> tuple[Tensor, ...]:
        g = g * factor
        g = g + wd * p
        if b is None:
            return (p - lr * g,)
        b = g if t == 1 else mu * b + c * g
        d = g + mu * b if nesterov else b
        p = p - lr * d
        return p, b

    buffers = {"momentums": momentums} if momentums else {}
    new_params, *new_momentums, new_copies, new_steps = for_each_parameter(
        "sgd_step", update, params, grads, buffers, copies, steps, found_inf
    )
    return new_params, new_momentums[0] if new_momentums else [], new_copies, new_steps
