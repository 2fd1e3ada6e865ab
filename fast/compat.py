"""Which upstream behaviour to reproduce: the same record as the reference's, field by field."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, kw_only=True)
class Compat:
    """Numerically visible upstream behaviour, off by default.

    Attributes:
        unscale_with_updated_scale: unscale with the scale after its update. Edges LS-1, FP-9.
        growth_counts_this_step: let the scale grow one clean step earlier. Edge LS-4.
        shared_step_counter: one counter for a whole group of `FusedAdam`, that of its last
            parameter with a gradient, advanced once for each dtype. Edges FA-1, FA-2.
        moments_in_param_dtype: `FusedAdam` keeps moments in the parameter's dtype. Edge FA-6.
        step_at_construction: the FP16 optimizers step with zero gradients when built. Edges FP-1,
            UF-5.
        external_scale_stays: an external loss scale is not divided out. Edges LS-2, FP-12.
        report_scaled_norm: the unfused optimizer reports the norm of scaled gradients. Edge UF-1.
        clip_without_experts: the unfused optimizer's clip norm leaves experts out. Edge ME-3.
        keep_masters_on_load: loading without fp32 weights keeps bf16's old masters. Edge BF-5.
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
        chosen = {field.name: True for field in fields(cls)}
        return cls(**{**chosen, "growth_counts_this_step": False})


CORRECT = Compat()


def moment_dtype(compat: Compat, param_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which `FusedAdam` keeps moments."""
    if compat.moments_in_param_dtype:
        return param_dtype
    return torch.float32
