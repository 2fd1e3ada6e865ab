"""Correct by default, upstream on request: one record.

Only behaviour that changes numbers in normal training is selectable. Edge ids refer to the edge
table (docs/reference/edges.md), which gives the decision and its reason for every edge,
selectable or not.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch


@dataclass(frozen=True, kw_only=True)
class Compat:
    """Numerically visible upstream behaviour to reproduce; all off is correct.

    Attributes:
        unscale_with_updated_scale: update the loss scale before unscaling, so that the step on
            which the scale grows applies a fraction of the gradient. Edges LS-1, FP-9, Z-8.
        growth_counts_this_step: the scale grows with clean step number scale_window, not after it,
            as DeepSpeed 0.14 did. Edge LS-4.
        shared_step_counter: in `FusedAdam` only the last parameter of a group with a gradient
            counts, once for each dtype in the group, and its count serves all. Edges FA-1, FA-2.
        moments_in_param_dtype: `FusedAdam` stores both moments in the parameter's dtype, where
            small squares underflow in fp16. Edge FA-6.
        step_at_construction: the FP16 optimizers take a step with zero gradients when they are
            built, which decays master weights and advances counters. Edges FP-1, UF-5.
        external_scale_stays: an external loss scale multiplies the loss in the FP16 optimizers,
            and is not divided out. Edges LS-2, FP-12.
        report_scaled_norm: `FP16UnfusedOptimizer` reports the norm of the gradients as they are
            stored, still multiplied by the loss scale. Edge UF-1.
        clip_without_experts: `FP16UnfusedOptimizer` leaves the gradients of experts out of the norm
            that clips, and clips them with it. Edge ME-3.
        keep_masters_on_load: `BF16Optimizer` keeps its masters when it loads a checkpoint without
            fp32 weights, whatever the model weights are. Edge BF-5.
    """

    unscale_with_updated_scale: bool = False
    growth_counts_this_step: bool = False
    shared_step_counter: bool = False
    moments_in_param_dtype: bool = False
    step_at_construction: bool = False
    external_scale_stays: bool = False
    report_scaled_norm: bool = False
    clip_without_experts: bool = False
    keep_masters_on_load: bool = False

    @classmethod
    def deepspeed(cls) -> Compat:
        """DeepSpeed 0.19.8: everything but the early growth, which is that of 0.14."""
        everything = cls(**{field.name: True for field in fields(cls)})
        return replace(everything, growth_counts_this_step=False)


CORRECT = Compat()


def moment_dtype(compat: Compat, param_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which `FusedAdam` stores moments (FA-6)."""
    return param_dtype if compat.moments_in_param_dtype else torch.float32
