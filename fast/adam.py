"""Adam and AdamW over lists of tensors, in place.

    g = fp32(grad) * factor;  L2: g = g + wd * p
    m = b1 * m + c1 * g;  v = b2 * v + (c2 * g) * g
    u = (m / k1) / (sqrt(v / k2) + eps);  decoupled: u = u + wd * p
    p = p - lr * u

One tensor that is not empty takes the flat kernel, several take the list kernel. Two launches for
one dtype combination, and one more for each further one.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from twinstep.contract.tensors import FLOATS
from twinstep.fast.checks import FP32, Dtypes, require_controls, require_lists, require_steps
from twinstep.fast.kernels import adam as kernels

ADAM_DTYPES: dict[str, Dtypes] = {
    "params": FLOATS,
    "grads": FLOATS,
    "exp_avgs": FP32,
    "exp_avg_sqs": FP32,
    "copies": FLOATS,
}


def require_adam(
    where: str,
    lists: Mapping[str, Sequence[Tensor]],
    steps: Sequence[Tensor],
    controls: Mapping[str, Tensor],
) -> None:
    """Check the arguments of an Adam step; `lists` and controls by name."""
    near = next(iter(controls.values()))
    given = {name: tensors for name, tensors in lists.items() if name != "copies" or len(tensors)}
    require_lists(where, given, ADAM_DTYPES, near)
    require_steps(where, steps, len(lists["params"]), near)
    require_controls(where, near, controls)


def adam_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Tensor,
    beta1: Tensor,
    beta2: Tensor,
    eps: Tensor,
    weight_decay: Tensor,
    factor: Tensor,
    found_inf: Tensor,
    bias_correction: bool,
) -> None:
    """Adam with L2 weight decay: the decay is part of the gradient, and so of both moments.

    Args:
        params: fp32 master weights, or fp16/bf16 weights without masters; contiguous, on one
            device like everything else; written.
        grads: fp32, fp16 or bf16.
        exp_avgs: first moments, fp32; written.
        exp_avg_sqs: second moments, fp32; written.
        copies: low-precision model weights, or an empty list; written.
        steps: completed steps, int64, shape (); written.
        lr: learning rate, float64, shape (), like the four that follow.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added outside the square root.
        weight_decay: of either sign.
        factor: multiplies every gradient, fp32, shape ().
        found_inf: not 0 skips the step, and nothing is written; fp32, shape ().
        bias_correction: False uses 1 for both corrections.

    Raises:
        TypeError: a dtype is not one of the above.
        ValueError: lengths, shapes or devices differ, or a tensor is not contiguous.
        RuntimeError: nothing here can run kernels on that device.
    """
    controls = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps}
    controls |= {"weight_decay": weight_decay, "factor": factor, "found_inf": found_inf}
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs}
    lists |= {"exp_avg_sqs": exp_avg_sqs, "copies": copies}
    require_adam("adam_step_", lists, steps, controls)
    kernels.adam_step_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        copies,
        steps,
        **controls,
        bias_correction=bias_correction,
    )


def adamw_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Tensor,
    beta1: Tensor,
    beta2: Tensor,
    eps: Tensor,
    weight_decay: Tensor,
    factor: Tensor,
    found_inf: Tensor,
    bias_correction: bool,
) -> None:
    """AdamW: the decay acts on the weights alone. Arguments and errors as in `adam_step_`."""
    controls = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps}
    controls |= {"weight_decay": weight_decay, "factor": factor, "found_inf": found_inf}
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs}
    lists |= {"exp_avg_sqs": exp_avg_sqs, "copies": copies}
    require_adam("adamw_step_", lists, steps, controls)
    kernels.adamw_step_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        copies,
        steps,
        **controls,
        bias_correction=bias_correction,
    )
