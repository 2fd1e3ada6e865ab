"""LAMB over lists of tensors, in place.

    h = fp32(grad) * factor
    m = b1 * m + c1 * h;  v = b2 * v + (c2 * h) * h
    u = m / (sqrt(v) + eps), or m / sqrt(v + eps);  u = u + wd * p
    rho = max(min(|p| / |u|, max_coeff), min_coeff);  1 where either norm is 0
    p = p - (a * rho) * u, a the step size with both bias corrections in it

Four launches for one dtype combination, and two more for each further one.
"""

from collections.abc import Sequence

from torch import Tensor

from twinstep.fast.adam import require_adam
from twinstep.fast.kernels import lamb as kernels


def lamb_step_(
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
    max_coeff: Tensor,
    min_coeff: Tensor,
    factor: Tensor,
    found_inf: Tensor,
    bias_correction: bool,
    eps_inside_sqrt: bool,
) -> None:
    """One step of LAMB; the norms are of whole tensors, so joining or cutting them matters.

    Args:
        params: weights of any shape, fp32, fp16 or bf16, contiguous, on one device like everything
            else; written.
        grads: fp32, fp16 or bf16.
        exp_avgs: first moments, fp32; written.
        exp_avg_sqs: second moments, fp32; written.
        copies: low-precision model weights, or an empty list; written.
        steps: completed steps, int64, shape (); written.
        lr: learning rate, float64, shape (), like the six that follow.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the square root, or under it.
        weight_decay: of the direction, of either sign.
        max_coeff: upper bound of the trust ratio.
        min_coeff: lower bound of the trust ratio.
        factor: multiplies every gradient, fp32, shape ().
        found_inf: not 0 skips the step, and nothing is written; fp32, shape ().
        bias_correction: False uses lr itself as the step size.
        eps_inside_sqrt: True divides by sqrt(v + eps), False by sqrt(v) + eps.

    Raises:
        TypeError: a dtype is not one of the above.
        ValueError: lengths, shapes or devices differ, or a tensor is not contiguous.
        RuntimeError: nothing here can run kernels on that device.
    """
    controls = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    controls |= {"max_coeff": max_coeff, "min_coeff": min_coeff}
    controls |= {"factor": factor, "found_inf": found_inf}
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs}
    lists |= {"exp_avg_sqs": exp_avg_sqs, "copies": copies}
    require_adam("lamb_step_", lists, steps, controls)
    kernels.lamb_step_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        copies,
        steps,
        **controls,
        bias_correction=bias_correction,
        eps_inside_sqrt=eps_inside_sqrt,
    )
