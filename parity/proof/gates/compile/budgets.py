"""Budgets of main loops: what a large tensor's elements may cost, and what they may never meet."""

from __future__ import annotations

import re
from collections.abc import Iterator

from twinstep.parity.proof.gates.compile.artefacts import Facts

SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
# Instructions for each element of the exact sum of squares, by bytes of an element.
INSTRUCTIONS = {"sm_90": {2: 12, 4: 18}, "sm_100": {2: 10, 4: 18}}
NEVER = {
    "loop_barrier": "a barrier in the main loop",
    "loop_shared": "shared memory or a shuffle in the main loop",
    "loop_float64": "float64 in the main loop, which some devices have at 1/64 of the rate",
    "loop_local": "local memory in the main loop",
    "loop_narrow": "a load of a single element in the main loop",
    "spilled": "a spilled register",
}
# Of LAMB's moments with both sums of fp32, 36 of them the sums'; the rest is its division and root.
MOMENTS = {"lamb_moments_kernel": 81, "apex_lamb_moments_kernel": 126, "cuda.lamb_moments": 77}
_SUM = re.compile(
    r"reduce_(?:flat|list)_kernel .*?(?:grads|G)=(\w+).* KIND=2|cuda\.reduce_squares G=(\w+)"
)
# What never is in a main loop is in none of these, though only sums have a budget of instructions.
_LOOPS = re.compile(r"cuda\.(?:adam_update|lamb_weights) ")


def over_budget(variant: str, target: str, facts: Facts) -> Iterator[tuple[str, int, int, str]]:
    """Facts of a kernel with a budget that break it: name, allowed, found, one sentence."""
    budget = _budget(variant, target)
    if budget is None and not _LOOPS.match(variant):
        return
    if "loop" not in facts:
        yield "loop", 1, 0, "no loop with wide loads: large tensors go element by element"
        return
    # There a lane has two elements of LAMB's tile: 4 bytes, if they have 16 bits.
    two = target == "gfx942" and _name(variant) in MOMENTS
    for fact, why in NEVER.items():
        if facts.get(fact, 0) and not (two and fact == "loop_narrow"):
            yield fact, 0, facts[fact], why
    if budget is None:
        return
    size, allowed = budget
    if allowed is not None and facts["loop"] * size > allowed * facts["loop_bytes"]:
        elements = facts["loop_bytes"] // size
        why = f"more than {allowed} instructions for each of {elements} elements in the main loop"
        yield "loop", allowed * elements, facts["loop"], why


def _budget(variant: str, target: str) -> tuple[int, int | None] | None:
    """Bytes that the loop reads of an element, and instructions that it may have there."""
    found = _SUM.match(variant)
    if found is not None:
        size = SIZES[found[1] or found[2]]
        return size, INSTRUCTIONS.get(target, {}).get(size)
    allowed = MOMENTS.get(_name(variant))
    if allowed is None:
        return None
    dtypes = dict(re.findall(r"\b([PG])=(\w+)", variant))
    size = SIZES[dtypes["P"]] + SIZES[dtypes["G"]] + 2 * SIZES["fp32"]
    return size, allowed if target in INSTRUCTIONS else None


def _name(variant: str) -> str:
    return variant.partition(" ")[0]
