"""The exact norm of all gradients on the CPU, and whether any is non-finite, in one read.

Limbs are those of `fast.kernels._limbs`, tile by tile, so that they add up with those of a GPU.
"""

import ctypes
import math
from collections.abc import Sequence

from torch import Tensor

from twinstep.contract.tensors import FLOATS
from twinstep.fast.kernels._limbs import LIMBS, NONFINITE, ORIGIN
from twinstep.fast.kernels.cpu.library import NUMBERS, call, library, require_cpu
from twinstep.fast.kernels.reduce import new_limbs
from twinstep.fast.runtime.checks import require_controls, require_lists


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
    words = limbs.tolist()
    # The quotient of two integers is rounded once.
    total = sum(word << (32 * place) for place, word in enumerate(words[: LIMBS.value]))
    root = math.sqrt(total / (1 << (32 * ORIGIN.value)))
    nonfinite = words[NONFINITE.value]
    if nonfinite:
        root = math.nan if nonfinite >> 32 else math.inf
        found_inf.fill_(1.0)
    library().twinstep_round(ctypes.c_double(root), ctypes.c_void_p(norm.data_ptr()))
