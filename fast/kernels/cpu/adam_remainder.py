"""AdamW on bf16 weights whose fp32 masters are kept as 16-bit remainders, in one pass.

The arithmetic and the bytes of `fast.kernels.adam_remainder`.
"""

from collections.abc import Sequence

from torch import Tensor

from twinstep.fast.kernels.cpu.adam import update_adam
from twinstep.fast.runtime.checks import require_remainder_step
from twinstep.fast.runtime.native import require_cpu


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
    """AdamW on masters of 16 + 16 bits; see `fast.kernels.adam_remainder`."""
    where = "adamw_remainder_step_"
    hyper = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    hyper["factor"] = factor
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    lists |= {"remainders": remainders}
    require_remainder_step(where, lists, steps, {**hyper, "found_inf": found_inf})
    require_cpu(where, found_inf)
    if found_inf.item() == 0.0:
        numbers = [value.item() for value in hyper.values()]
        update_adam(lists, steps, numbers, bias_correction=bias_correction, decoupled=True)
