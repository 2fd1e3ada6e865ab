"""AdamW on bf16 weights whose fp32 masters are kept as 16-bit remainders.

    bits(master) = 2^16 bits(weight) + remainder

The kernels of `fast.kernels.adam`: for a 16-bit gradient they read 2 + 2 + 2 + 4 + 4 and write
2 + 2 + 4 + 4 bytes per parameter: 26, and 28 with the pass of the norm, where fp32 masters and
copies take 30.
"""

from collections.abc import Sequence

from torch import Tensor

from twinstep.fast.kernels.adam import prepare_adam, update_adam
from twinstep.fast.runtime.checks import require_remainder_step


def adamw_remainder_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    remainders: Sequence[Tensor],
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
    """AdamW on masters of 16 + 16 bits.

    Args:
        params: model weights, bf16, contiguous, on one device like everything else; written.
        grads: fp32, fp16 or bf16.
        exp_avgs: first moments, fp32; written.
        exp_avg_sqs: second moments, fp32; written.
        remainders: what the masters have beyond the weights, int16; written.
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
    hyper = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    controls = {**hyper, "factor": factor, "found_inf": found_inf}
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    lists |= {"remainders": remainders}
    require_remainder_step("adamw_remainder_step_", lists, steps, controls)
    coefficients = prepare_adam(steps, list(controls.values()), bias_correction=bias_correction)
    update_adam(list(lists.values()), coefficients, decoupled=True)
