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
_SUM = re.compile(
    r"reduce_(?:flat|list)_kernel .*?(?:grads|G)=(\w+).* KIND=2|cuda\.reduce_squares G=(\w+)"
)
# What never is in a main loop is in none of these, though only sums have a budget of instructions.
_LOOPS = re.compile(r"cuda\.(?:adam_update|lamb_moments|lamb_weights) ")


def over_budget(variant: str, target: str, facts: Facts) -> Iterator[tuple[str, int, int, str]]:
    """Facts of a kernel with a budget that break it: name, allowed, found, one sentence."""
    found = _SUM.match(variant)
    if found is None and not _LOOPS.match(variant):
        return
    if "loop" not in facts:
        yield "loop", 1, 0, "no loop with wide loads: large tensors go element by element"
        return
    for fact, why in NEVER.items():
        if facts.get(fact, 0):
            yield fact, 0, facts[fact], why
    if found is None:
        return
    size = SIZES[found[1] or found[2]]
    allowed = INSTRUCTIONS.get(target, {}).get(size)
    if allowed is not None and facts["loop"] * size > allowed * facts["loop_bytes"]:
        elements = facts["loop_bytes"] // size
        why = f"more than {allowed} instructions for each of {elements} elements in the main loop"
        yield "loop", allowed * elements, facts["loop"], why
