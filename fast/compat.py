"""Which upstream behaviour to reproduce: the same record as the reference's, field by field."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Compat:
    """Numerically visible upstream behaviour, off by default.

    Attributes:
        unscale_with_updated_scale: unscale with the scale after its update. Edge LS-1.
        growth_counts_this_step: let the scale grow one clean step earlier. Edge LS-4.
        shared_step_counter: one counter for a whole group of `FusedAdam`, that of its last
            parameter with a gradient, advanced once for each dtype. Edges FA-1, FA-2.
        moments_in_param_dtype: `FusedAdam` keeps moments in the parameter's dtype. Edge FA-6.
    """

    unscale_with_updated_scale: bool = False
    growth_counts_this_step: bool = False
    shared_step_counter: bool = False
    moments_in_param_dtype: bool = False

    @classmethod
    def deepspeed(cls) -> Compat:
        """DeepSpeed 0.19.8: everything but the early growth, which is that of 0.14."""
        late = ("shared_step_counter", "moments_in_param_dtype", "unscale_with_updated_scale")
        return cls(**dict.fromkeys(late, True))


CORRECT = Compat()


def moment_dtype(compat: Compat, param_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which `FusedAdam` keeps moments."""
    if compat.moments_in_param_dtype:
        return param_dtype
    return torch.float32
