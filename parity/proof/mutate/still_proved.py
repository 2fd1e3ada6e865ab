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
    "fast/kernels/_arith.py power, operator: left >> 1 -> left << 1": (
        "the loop ends when all exponents have run out, below 2^32 steps; a proof holds for the "
        "counters that it names, of 0 and 4 steps, and `value` rejects it at the large ones"
    ),
    "fast/kernels/_lamb.py lamb_moments, constant: 6 -> 6 + 1": (
        "Triton pairs six names with the first six of seven coefficients and drops the last"
    ),
}
