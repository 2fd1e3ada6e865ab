"""Accumulation on one flat tensor: right for every size, or wrong at some of them."""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from twinstep.parity.operations.table import operation_named
from twinstep.parity.registry.kernels import Kernel

NARROW = "32-bit offsets"


@triton.jit
def _accumulate(accumulator, grad, n, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    if FAULT != "32-bit offsets":
        pid = pid.to(tl.int64)
    at = pid * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    if FAULT == "one beyond":
        here = at <= n
    if FAULT == "last one left out":
        here = at + 1 < n
    if FAULT == "tail of seven left out":
        here = (at < n) & ((n - at) != 7)
    if FAULT == "no mask":
        here = at >= 0
    if FAULT == "one block twice":
        at = tl.where(pid == 1, at - BLOCK, at)
        here = at < n
    if FAULT == "strided":
        at = tl.arange(0, BLOCK).to(tl.int64) * tl.num_programs(0) + pid
        here = at < n
    reads = at
    if FAULT == "reads ahead":
        reads = at + 1
    a = tl.load(accumulator + at, mask=here)
    g = tl.load(grad + reads, mask=here)
    if FAULT == "only where not zero":
        here = here & (g != 0.0)
    tl.store(accumulator + at, a + g, mask=here)
    if FAULT == "twice":
        tl.store(accumulator + at, a + g, mask=here)


def flat(fault: str = "") -> Callable[..., None]:
    def accumulate(accumulators: list[Tensor], grads: list[Tensor]) -> None:
        for a, g in zip(accumulators, grads, strict=True):
            n = a.numel()
            _accumulate[(triton.cdiv(n, 64),)](a, g, n, FAULT=fault, BLOCK=64, num_warps=1)

    return accumulate


def flat_row(fault: str = "") -> Kernel:
    return Kernel(
        name="mine", operation=operation_named("accumulate", "tests"), function=flat(fault),
        arithmetic="exact", dtypes=("fp32",), layouts=("flat",), engines=("replay",), place="",
    )  # fmt: skip
