"""dtype combinations: the names in the table's dtype column and what meets in each.

`fp16` is mixed precision as usual: fp32 weights and state, fp16 gradients and copies. `fp16-pure`
has no fp32 weights. `mixed` is one list in which tensor i is fp16, bf16 or fp32 in turn.
"""

from __future__ import annotations

import torch

from twinstep.parity.operations.operation import Combination

FP32, FP16, BF16, INT64 = torch.float32, torch.float16, torch.bfloat16, torch.int64
NARROW = {"fp32": FP32, "fp16": FP16, "bf16": BF16}
TURNS = (FP16, BF16, FP32)


def step_combinations(*state: str) -> dict[str, Combination]:
    """Combinations of an optimizer step whose fp32 state lists are named `state`."""
    kept: dict[str, tuple[torch.dtype, ...]] = {name: (FP32,) for name in state}
    kept["steps"] = (INT64,)

    def row(param: Turn, grad: Turn, copy: Turn = ()) -> Combination:
        entry = {"params": param, "grads": grad, **kept}
        return {**entry, "copies": copy} if copy else entry

    return {
        "fp32": row((FP32,), (FP32,)),
        "fp16": row((FP32,), (FP16,), (FP16,)),
        "bf16": row((FP32,), (BF16,), (BF16,)),
        "fp16-pure": row((FP16,), (FP16,)),
        "bf16-pure": row((BF16,), (BF16,)),
        "fp32-to-bf16": row((FP32,), (FP32,), (BF16,)),
        "mixed": row(TURNS, TURNS),
    }


def remainder_combinations() -> dict[str, Combination]:
    """bf16 weights with 16-bit remainders, and gradients of the named dtype: bf16, or fp32 sums."""
    state: dict[str, Turn] = {"exp_avgs": (FP32,), "exp_avg_sqs": (FP32,), "steps": (INT64,)}
    return {
        key: {"params": (BF16,), "grads": (dtype,), **state, "remainders": (torch.int16,)}
        for key, dtype in NARROW.items()
        if dtype is not FP16
    }


Turn = tuple[torch.dtype, ...]


def single_combinations(name: str, *, mixed: bool = True) -> dict[str, Combination]:
    """Combinations of an operation on one list."""
    rows: dict[str, Combination] = {key: {name: (dtype,)} for key, dtype in NARROW.items()}
    return {**rows, "mixed": {name: TURNS}} if mixed else rows


def pack_combinations() -> dict[str, Combination]:
    """Combinations of flatten and unflatten: one dtype on both sides."""
    return {key: {"tensors": (dtype,), "flat": (dtype,)} for key, dtype in NARROW.items()}


def accumulate_combinations() -> dict[str, Combination]:
    """fp32 accumulators with gradients of any dtype, and bf16 throughout."""
    rows: dict[str, Combination] = {
        key: {"accumulators": (FP32,), "grads": (dtype,)} for key, dtype in NARROW.items()
    }
    return {**rows, "bf16-pure": {"accumulators": (BF16,), "grads": (BF16,)}}


def cast_combinations() -> dict[str, Combination]:
    """From fp32 to the named dtype."""
    return {key: {"sources": (FP32,), "copies": (dtype,)} for key, dtype in NARROW.items()}


SCALAR: dict[str, Combination] = {"scalar": {}}
