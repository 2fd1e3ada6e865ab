"""Gradient accumulation on the CPU: a = fp32(a) + fp32(g), rounded once; 10 bytes as on a GPU."""

from collections.abc import Sequence

from torch import Tensor

from twinstep.fast.runtime.checks import require_pairs
from twinstep.fast.runtime.native import NUMBERS, call, require_cpu


def accumulate_(accumulators: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Add every gradient to its accumulator; arguments and errors as in `fast.kernels.accumulate`.

    Raises:
        RuntimeError: tensors are not on the CPU, or there is no compiler.
    """
    require_pairs("accumulate_", {"accumulators": accumulators, "grads": grads})
    for tensor in accumulators[:1]:
        require_cpu("accumulate_", tensor)
    pairs = zip(accumulators, grads, strict=True)
    rows = (
        (a.data_ptr(), g.data_ptr(), a.numel(), NUMBERS[a.dtype], NUMBERS[g.dtype])
        for a, g in pairs
    )
    call("twinstep_accumulate", rows)
