"""The exact norm of all gradients and whether any is non-finite, in one read, in CUDA C++.

The limbs of `fast.kernels._limbs`. On the way that most elements take there are 9 machine
instructions for one of 16 bits and 17 for one of 32 (sm_90; `parity compile` holds them), none of
them float64. A block's warps wait for one another at its ends alone.
"""

from collections.abc import Sequence

from torch import Tensor

from twinstep.contract.tensors import FLOATS
from twinstep.fast.kernels.cuda.library import NUMBERS, launch, resident
from twinstep.fast.kernels.reduce import SPAN, new_limbs
from twinstep.fast.runtime.checks import require_controls, require_lists
from twinstep.fast.runtime.tables import tensor_tables

THREADS = 256


def add_squares(grads: Sequence[Tensor], limbs: Tensor) -> None:
    """Add the squares of all gradients to the limbs: one launch for each dtype.

    Args:
        grads: fp32, fp16 or bf16, contiguous, on one device.
        limbs: as `fast.kernels.reduce.new_limbs` makes them; written.
    """
    for table in tensor_tables([grads], chunk=SPAN.value):
        macros = {"G": NUMBERS[table.dtypes[0]]}
        blocks = min(table.chunks, resident("reduce", "reduce_squares", THREADS, limbs, macros))
        args = (table.data, limbs, table.tensors, table.chunks)
        launch("reduce", "reduce_squares", blocks, THREADS, limbs, args, macros, reaches=[grads])


def global_norm_(grads: Sequence[Tensor], *, norm: Tensor, found_inf: Tensor) -> None:
    """Write the norm and whether any gradient is not finite, as in `fast.kernels.reduce`.

    Raises:
        TypeError: a dtype is not one of fp32, fp16 and bf16.
        ValueError: devices differ, or a tensor is not contiguous.
        RuntimeError: nothing here can run kernels on that device, or NVRTC is not installed.
    """
    require_lists("global_norm_", {"grads": grads}, {"grads": FLOATS}, norm)
    require_controls("global_norm_", norm, {"norm": norm, "found_inf": found_inf})
    limbs = new_limbs(norm.device)
    add_squares(grads, limbs)
    launch("reduce", "round_norm", 1, 1, norm, (limbs, norm, found_inf), {"G": 0})
