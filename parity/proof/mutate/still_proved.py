"""Faults in the arithmetic that stay proved, each with the argument why they make no difference."""

from __future__ import annotations

_TILE = "fast/kernels/accumulate.py accumulate_tile, "
_HALF = "accumulators.dtype.element_ty == tl.float16"
_WIDENED = (
    "both ways widen a bf16 gradient exactly; they differ for sums of fp16 and gradients of bf16, "
    "which no dtype combination of the operation has"
)

STILL_PROVED: dict[str, str] = {
    f"{_TILE}comparison: {_HALF} -> accumulators.dtype.element_ty != tl.float16": _WIDENED,
    f"{_TILE}operator: (g.dtype == tl.bfloat16) & ({_HALF}) -> "
    f"(g.dtype == tl.bfloat16) | ({_HALF})": _WIDENED,
    "fast/kernels/clip.py clip_coefficient_kernel, comparison: k < 1.0 -> k <= 1.0": (
        "where k is 1, k and the constant 1 are one number"
    ),
    "fast/kernels/_arith.py step_pointers, operator: steps + lane -> steps - lane": (
        "without a table there is one counter, and every lane but lane 0 is masked"
    ),
    "fast/kernels/_lamb.py lamb_moments, constant: 6 -> 6 + 1": (
        "Triton pairs six names with the first six of seven coefficients and drops the last"
    ),
    "fast/kernels/_lamb_sweeps.py window_of_tile, operator: tl.max(bits_of(tl.abs(x))) -> "
    "tl.min(bits_of(tl.abs(x)))": (
        "a window decides how fast a sum is formed; a span that leaves it is summed the general way"
    ),
}
