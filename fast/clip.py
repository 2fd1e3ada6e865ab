"""The exact norm of all gradients and the factors that clip it.

    norm   = fp32(sqrt(S)), S the real sum of squares, rounded once to float64
    factor = 1 / (scale * c) if c > 1 else 1 / scale,  c = (norm / scale + 1e-6) / max_norm
    factor = k if k < 1 else 1,                        k = max_norm / (norm + 1e-6)

The two factors do not clip where max_norm is 0 or less.
"""

from collections.abc import Sequence

from torch import Tensor

from twinstep.contract.tensors import FLOATS
from twinstep.fast.checks import require_controls, require_lists
from twinstep.fast.kernels import clip as kernels
from twinstep.fast.kernels import reduce


def global_norm_(grads: Sequence[Tensor], *, norm: Tensor, found_inf: Tensor) -> None:
    """Write the norm of all gradients, and whether any is not finite.

    Args:
        grads: fp32, fp16 or bf16, contiguous; read once.
        norm: fp32, shape (); written. Any NaN gives NaN, otherwise any infinity gives +inf;
            no elements give 0.0.
        found_inf: fp32, shape (); set to 1.0, never cleared.

    Raises:
        TypeError: a dtype is not one of the above.
        ValueError: devices differ, or a tensor is not contiguous.
    """
    require_lists("global_norm_", {"grads": grads}, {"grads": FLOATS}, norm)
    require_controls("global_norm_", norm, {"norm": norm, "found_inf": found_inf})
    reduce.global_norm_(grads, norm=norm, found_inf=found_inf)


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
    kernels.clip_factor_(**controls)


def clip_coefficient_(*, norm: Tensor, max_norm: Tensor, factor: Tensor) -> None:
    """Write the factor that clips gradients which carry no scale.

    Args:
        norm: fp32, shape ().
        max_norm: float64, shape ().
        factor: fp32, shape (); written. A NaN norm gives 1, an infinite one 0.
    """
    controls = {"norm": norm, "max_norm": max_norm, "factor": factor}
    require_controls("clip_coefficient_", norm, controls)
    kernels.clip_coefficient_(**controls)
