"""The two clip formulas as one-program kernels over 0-dim tensors.

    factor = 1 / (scale * c) if c > 1 else 1 / scale,  c = (norm / scale + 1e-6) / max_norm
    factor = k if k < 1 else 1,                        k = max_norm / (norm + 1e-6)

Neither clips where max_norm is 0 or less.

Versions, and what each costs: one. The formula of a whole step is a device function, shared with
the finalise kernel, which evaluates it without a launch of its own.
"""

import triton
import triton.language as tl
from torch import Tensor

from twinstep.fast.runtime.checks import require_controls
from twinstep.fast.runtime.dispatch import launch

EPSILON = tl.constexpr(1e-6)


@triton.jit
def unscale_and_clip(norm, scale, max_norm):
    """Return the fp32 factor for scaled gradients whose fp32 norm is `norm`; all in float64."""
    c = (norm.to(tl.float64) / scale + EPSILON) / max_norm
    clips = (max_norm > 0.0) & (c > 1.0)
    combined = tl.where(clips, scale * c, scale)
    return (1.0 / combined).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["norm", "scale", "max_norm", "factor"])
def clip_factor_kernel(norm, scale, max_norm, factor):
    """One factor for scaled gradients."""
    value = unscale_and_clip(tl.load(norm), tl.load(scale), tl.load(max_norm))
    tl.store(factor, value)


@triton.jit(do_not_specialize_on_alignment=["norm", "max_norm", "factor"])
def clip_coefficient_kernel(norm, max_norm, factor):
    """One factor for gradients that carry no scale."""
    largest = tl.load(max_norm)
    k = largest / (tl.load(norm).to(tl.float64) + EPSILON)
    clips = (largest > 0.0) & (k < 1.0)
    tl.store(factor, tl.where(clips, k, 1.0).to(tl.float32))


def clip_factor_(*, norm: Tensor, scale: Tensor, max_norm: Tensor, factor: Tensor) -> None:
    """Write the factor that unscales and clips gradients which still carry the loss scale.

    Args:
        norm: of the gradients as stored, fp32, shape ().
        scale: loss scale, float64, shape ().
        max_norm: float64, shape ().
        factor: fp32, shape (); written. A NaN norm does not clip.
    """
    controls = {"norm": norm, "scale": scale, "max_norm": max_norm, "factor": factor}
    require_controls("clip_factor_", norm, controls)
    launch(clip_factor_kernel, 1, factor, (norm, scale, max_norm, factor), warps=1)


def clip_coefficient_(*, norm: Tensor, max_norm: Tensor, factor: Tensor) -> None:
    """Write the factor that clips gradients which carry no scale.

    Args:
        norm: fp32, shape ().
        max_norm: float64, shape ().
        factor: fp32, shape (); written. A NaN norm gives 1, an infinite one 0.
    """
    controls = {"norm": norm, "max_norm": max_norm, "factor": factor}
    require_controls("clip_coefficient_", norm, controls)
    launch(clip_coefficient_kernel, 1, factor, (norm, max_norm, factor), warps=1)
