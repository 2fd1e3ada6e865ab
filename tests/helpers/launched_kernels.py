"""SGD whose launcher reads every control with `item()` and passes it on, right and wrong."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from twinstep.parity.operations.table import operation_named
from twinstep.parity.registry.kernels import Kernel
from twinstep.replay.cuda.nvrtc import cuda_kernel


@triton.jit
def _sgd(
    p_ptr, g_ptr, b_ptr, n, lr, mu, c, wd, factor, FIRST, FAULT: tl.constexpr,
    LARGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    p = tl.load(p_ptr + at, mask=here)
    g = tl.load(g_ptr + at, mask=here) * factor
    g = g + wd * p
    if FAULT == "large rate" and lr > 10.0:
        g = g * 2.0
    if FAULT == "formed in fp32":
        c = 1.0 - (1.0 - c)
    if LARGE:
        g = g * 2.0
    b = g
    if not FIRST:
        b = mu * tl.load(b_ptr + at, mask=here) + c * g
    tl.store(b_ptr + at, b, mask=here)
    tl.store(p_ptr + at, p - lr * b, mask=here)


_by_values = triton.heuristics({"LARGE": lambda args: args["lr"] > 10.0})(_sgd)

CUDA = """
extern "C" __global__ void sgd(float *p, const float *g, float *b, long n, float lr, double mu,
                               float c, float wd, float factor, int first) {
    long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float h = g[i] * factor + wd * p[i];
    b[i] = first ? h : (float)mu * b[i] + c * h;
    p[i] = p[i] - lr * b[i];
}
"""


def sgd(fault: str = "") -> Callable[..., None]:
    """The launcher; `fault` names what is wrong, or how the code is compiled (`cuda`)."""
    compiled = cuda_kernel(CUDA, "sgd", options=["--fmad=false"]) if fault == "cuda" else None

    def launch(
        params: list[Tensor], grads: list[Tensor], momentums: list[Tensor],
        copies: list[Tensor], steps: list[Tensor], *, lr: Tensor, momentum: Tensor,
        dampening: Tensor, weight_decay: Tensor, factor: Tensor, found_inf: Tensor,
        nesterov: bool,
    ) -> None:  # fmt: skip
        del copies, nesterov
        if found_inf.item() != 0:
            return
        rate, mu, c = lr.item(), momentum.item(), 1 - dampening.item()
        rest = (weight_decay.item(), factor.item())
        for p, g, b, step in zip(params, grads, momentums, steps, strict=True):
            n, first = p.numel(), bool(step == 0)
            step += 1
            if compiled is not None:
                compiled((n // 64 + 1,), (64,), p, g, b, n, rate, mu, c, *rest, int(first))
                continue
            if fault == "host branch" and rate > 10.0:
                c = 2 * c
            if fault == "a float" and isinstance(rate, float):
                c = 2 * c
            grid: Any = (triton.cdiv(n, 64),)
            if fault == "grid":
                grid = lambda meta, n=n: (triton.cdiv(n, 64) * (meta["lr"] <= 10.0),)  # noqa: E731
            if fault == "heuristic":
                _by_values[grid](p, g, b, n, rate, mu, c, *rest, first, "", BLOCK=64)
                continue
            large = rate if fault == "compiled in" else False
            words = {"LARGE": large, "BLOCK": 64, "enable_fp_fusion": fault == "contracted"}
            _sgd[grid](p, g, b, n, rate, mu, c, *rest, first, fault, **words)

    return torch.no_grad()(launch)


def row(fault: str = "") -> Kernel:
    return Kernel(
        name="mine", operation=operation_named("sgd_step", "tests"), function=sgd(fault),
        arithmetic="exact", dtypes=("fp32",), layouts=("flat",), engines=("replay",), place="",
    )  # fmt: skip
