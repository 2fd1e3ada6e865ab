"""AdamW on bf16 weights whose fp32 masters are kept as 16-bit remainders, one step.

A master is its weight and a signed integer of 16 bits, together the 32 bits of an fp32 number:

    bits(master) = 2^16 bits(weight) + remainder                              (mod 2^32)

so that the weight is the master rounded to the nearest bf16, a tie away from zero. (Ties to even
would have 65,537 masters for each even weight, one too many for 16 bits.) A master that is NaN
becomes the NaN 0x7FC00000 before it is cut. Nothing else is lost: masters move as fp32 masters do.

The idea is that of `store_param_remainders` in apex's DistributedFusedAdam.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twinstep.reference.adam import adamw_step
from twinstep.reference.parameters import Lists, check_lengths

QUIET_NAN = 0x7FC00000


def join_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master of bf16 weights and int16 remainders of equal shape; nothing is mutated."""
    upper = weight.view(torch.int16).to(torch.int64) << 16
    bits = (upper + remainder.to(torch.int64)) & 0xFFFFFFFF
    signed = torch.where(bits >= 2**31, bits - 2**32, bits)
    return signed.to(torch.int32).view(torch.float32)


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Weights in bf16 and int16 remainders of fp32 masters of any shape; nothing is mutated."""
    bits = master.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    bits = torch.where(master.isnan(), torch.full_like(bits, QUIET_NAN), bits)
    upper, lower = ((bits + 0x8000) >> 16) & 0xFFFF, bits & 0xFFFF
    return _int16(upper).view(torch.bfloat16), _int16(lower)


def _int16(pattern: Tensor) -> Tensor:
    """Patterns of 16 bits as signed integers."""
    return torch.where(pattern >= 2**15, pattern - 2**16, pattern).to(torch.int16)


def adamw_remainder_step(
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
) -> Lists:
    """AdamW on masters of 16 + 16 bits.

    Args:
        params: model weights, bf16; any shapes.
        grads: fp32, fp16 or bf16, one per parameter.
        exp_avgs: first moments, fp32.
        exp_avg_sqs: second moments, fp32.
        remainders: what the masters have beyond the weights, int16, one per parameter.
        steps: completed steps of each parameter, int64, shape ().
        lr: learning rate, float64, shape ().
        beta1: decay of the first moment, float64, shape ().
        beta2: decay of the second moment, float64, shape ().
        eps: added outside the square root, float64, shape ().
        weight_decay: decoupled, applied whatever its sign, float64, shape ().
        factor: multiplies every gradient (1/scale or less), fp32, shape ().
        found_inf: not 0 skips the step: every output has the bits of its input.
        bias_correction: False uses 1 for both corrections.

    Returns:
        New params, exp_avgs, exp_avg_sqs, remainders, steps. Nothing is mutated.

    Raises:
        ValueError: a length or a shape differs.
    """
    check_lengths("adamw_remainder_step", {"params": params, "remainders": remainders})
    masters, first, second, _, counters = adamw_step(
        [join_master(p, r) for p, r in zip(params, remainders, strict=True)],
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        factor=factor,
        found_inf=found_inf,
        bias_correction=bias_correction,
    )
    if found_inf.item() != 0:
        kept = [[tensor.clone() for tensor in tensors] for tensors in (params, remainders)]
        return kept[0], first, second, kept[1], counters
    halves = [split_master(master) for master in masters]
    return [w for w, _ in halves], first, second, [r for _, r in halves], counters
