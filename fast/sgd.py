"""SGD over lists of tensors, in place.

g = fp32(grad) * factor + wd * p
b = g on a tensor's first step, else momentum * b + (1 - dampening) * g
d = g + momentum * b with Nesterov's look-ahead, else b;  d = g without momentum buffers
p = p - lr * d
"""

from collections.abc import Sequence

from torch import Tensor

from twinstep.contract.tensors import FLOATS
from twinstep.fast.checks import FP32, Dtypes, require_controls, require_lists, require_steps
from twinstep.fast.kernels import sgd as kernels

SGD_DTYPES: dict[str, Dtypes] = {
    "params": FLOATS,
    "grads": FLOATS,
    "momentums": FP32,
    "copies": FLOATS,
}


def sgd_step_(
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
) -> None:
    """One SGD step.

    Args:
        params: fp32 master weights, or fp16/bf16 weights; contiguous; written.
        grads: fp32, fp16 or bf16.
        momentums: momentum buffers, fp32, or an empty list; written. What a buffer holds before
            the tensor's first step is ignored.
        copies: low-precision model weights, or an empty list; written.
        steps: completed steps, int64, shape (); written.
        lr: learning rate, float64, shape (), like the three that follow.
        momentum: decay of the buffer.
        dampening: 1 minus the weight of the gradient in the buffer.
        weight_decay: added to the gradient (L2), of either sign.
        factor: multiplies every gradient, fp32, shape ().
        found_inf: not 0 skips the step, and nothing is written; fp32, shape ().
        nesterov: look ahead by one step of the buffer.

    Raises:
        TypeError: a dtype is not one of the above.
        ValueError: lengths, shapes or devices differ, or a tensor is not contiguous.
        RuntimeError: nothing here can run kernels on that device.
    """
    where = "sgd_step_"
    lists = {"params": params, "grads": grads, "momentums": momentums, "copies": copies}
    given = {
        name: tensors
        for name, tensors in lists.items()
        if len(tensors) or name in ("params", "grads")
    }
    controls = {"lr": lr, "momentum": momentum, "dampening": dampening}
    controls |= {"weight_decay": weight_decay, "factor": factor, "found_inf": found_inf}
    require_lists(where, given, SGD_DTYPES, lr)
    require_steps(where, steps, len(params), lr)
    require_controls(where, lr, controls)
    kernels.sgd_step_(params, grads, momentums, copies, steps, **controls, nesterov=nesterov)
