"""The exact norm of all gradients on the CPU, and whether any is non-finite, in one read.

Limbs are those of `fast.kernels._limbs`, tile by tile, so that they add up with those of a GPU.
"""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from twinstep.contract.tensors import FLOATS
from twinstep.fast.kernels.reduce import new_limbs, norm_kernel
from twinstep.fast.runtime.checks import require_controls, require_lists
from twinstep.fast.runtime.native import NUMBERS, call, launch, require_cpu


def add_squares(grads: Sequence[Tensor], limbs: Tensor) -> None:
    """Add the squares of all gradients to the limbs, and count tiles that are not finite.

    Args:
        grads: fp32, fp16 or bf16, contiguous, on the CPU.
        limbs: as `fast.kernels.reduce.new_limbs` makes them, on the CPU; written.
    """
    rows = ((grad.data_ptr(), grad.numel(), NUMBERS[grad.dtype]) for grad in grads)
    call("twinstep_add_squares", rows, ctypes.c_void_p(limbs.data_ptr()))


def global_norm_(grads: Sequence[Tensor], *, norm: Tensor, found_inf: Tensor) -> None:
    """Write the norm and whether any gradient is not finite, as in `fast.kernels.reduce`.

    Raises:
        TypeError: a dtype is not one of fp32, fp16 and bf16.
        ValueError: devices differ, or a tensor is not contiguous.
        RuntimeError: tensors are not on the CPU, or there is no compiler.
    """
    require_lists("global_norm_", {"grads": grads}, {"grads": FLOATS}, norm)
    require_controls("global_norm_", norm, {"norm": norm, "found_inf": found_inf})
    require_cpu("global_norm_", norm)
    limbs = new_limbs(norm.device)
    add_squares(grads, limbs)
    launch(norm_kernel, 1, (limbs, norm, found_inf), {})
