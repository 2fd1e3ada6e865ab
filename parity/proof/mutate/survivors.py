"""Planted faults that no law sees, each with the argument why it is none or what sees it.

A fault is named by file, function, rule, and the text before and after. One that the judge kills
does not belong here, nor one that is no longer planted: the gate and a test say so.
"""

from __future__ import annotations

LIMBS = "fast/kernels/_limbs.py"
SURVIVORS: dict[str, str] = {
    f"{LIMBS} add_tile, operator: infinite + nan -> infinite - nan": (
        "the count is only tested for not being 0, in all and in its upper half: a - n 2^32 with "
        "0 <= a < 2^32 passes both tests exactly where a + n 2^32 does"
    ),
    f"{LIMBS} leading_digits, operator: rest | second -> rest & second": (
        "digits below the fourth decide no more than the last bit of the float64 sum, and the "
        "norm shows it only where the root lies within 2^-53 of the middle of two fp32 numbers; "
        "tests/fast/test_fast_limbs.py compares the sum itself"
    ),
    "fast/kernels/clip.py unscale_and_clip, comparison: c > 1.0 -> c >= 1.0": (
        "they differ at c = 1 alone, where scale * c is scale"
    ),
    "fast/kernels/clip.py clip_coefficient_kernel, comparison: k < 1.0 -> k <= 1.0": (
        "they differ at k = 1 alone, where both branches give 1"
    ),
    "fast/kernels/_prepare.py prepared, comparison: len(steps) > 1 -> len(steps) >= 1": (
        "a single counter is then found through a table of one address, with the same bits"
    ),
    "fast/kernels/_lamb_sweeps.py sweep_weights, comparison: start + TILE <= numel -> "
    "start + TILE < numel": (
        "they differ where a tile ends with the tensor: the branch with a mask then takes it, all "
        "lanes inside, and computes the same values from the same loads"
    ),
    "fast/kernels/sgd.py sgd_prepare_kernel, other: 0 -> 0 + 1": (
        "lanes without a tensor compute with this value and store nothing of it"
    ),
}
