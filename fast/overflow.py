"""Overflow: unscale gradients and notice those that were not finite.

found_inf = 1 if any stored gradient is inf or NaN, otherwise unchanged
g = fp32(g) * inv_scale, rounded once
"""

from collections.abc import Sequence

from torch import Tensor

from twinstep.contract.tensors import FLOATS
from twinstep.fast.checks import require_controls, require_lists
from twinstep.fast.kernels import unscale as kernels


def unscale_(grads: Sequence[Tensor], *, inv_scale: Tensor, found_inf: Tensor) -> None:
    """Unscale gradients in place.

    Args:
        grads: fp32, fp16 or bf16, contiguous; written, also where they are not finite.
        inv_scale: 1 / loss scale, fp32, shape ().
        found_inf: fp32, shape (); set to 1.0, never cleared. The bits decide, before the
            multiplication.

    Raises:
        TypeError: a dtype is not one of the above.
        ValueError: devices differ, or a tensor is not contiguous.
    """
    require_lists("unscale_", {"grads": grads}, {"grads": FLOATS}, inv_scale)
    require_controls("unscale_", inv_scale, {"inv_scale": inv_scale, "found_inf": found_inf})
    kernels.unscale_(grads, inv_scale=inv_scale, found_inf=found_inf)
