"""Accumulation with an autotuner whose configurations give one set of bits, or two."""

from collections.abc import Callable, Sequence

import triton
import triton.language as tl
from torch import Tensor

from twinstep.parity.operations.table import operation_named
from twinstep.parity.registry.kernels import Kernel


@triton.jit
def _add(accumulator, grad, n, ORDER: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(accumulator + at, mask=at < n).to(tl.float32)
    g = tl.load(grad + at, mask=at < n).to(tl.float32)
    if ORDER == "minus":
        a = a - g * -1.0
    elif ORDER == "rounded":
        a = a + g.to(tl.bfloat16).to(tl.float32)
    elif ORDER == "other":
        a = g + a
    else:
        a = a + g
    tl.store(accumulator + at, a, mask=at < n)


def configured(orders: Sequence[str]) -> Callable[..., None]:
    configs = [
        triton.Config({"ORDER": order, "BLOCK": block}, num_warps=warps)
        for order, (block, warps) in zip(
            orders, ((64, 1), (64, 2), (128, 4), (32, 1)), strict=False
        )
    ]
    kernel = triton.autotune(configs, key=[])(_add)

    def accumulate(accumulators: list[Tensor], grads: list[Tensor]) -> None:
        for a, g in zip(accumulators, grads, strict=True):
            n = a.numel()
            kernel[lambda meta, n=n: (triton.cdiv(n, meta["BLOCK"]),)](a, g, n)

    return accumulate


def configured_row(orders: Sequence[str], name: str = "mine") -> Kernel:
    return Kernel(
        name=name, operation=operation_named("accumulate", "tests"), function=configured(orders),
        arithmetic="exact", dtypes=("fp32",), layouts=("flat",), engines=("replay",),
        place="",
    )  # fmt: skip
