"""Fast kernels of this project, as they were when the corpus was made."""

import math

import torch

from fast.kernels.accumulate import accumulate_flat_kernel
from fast.kernels.adam import adam_flat_kernel
from fast.kernels.cast import cast_flat_kernel
from fast.kernels.reduce import reduce_flat_kernel
from fast.kernels.unscale import unscale_flat_kernel
from parity.replay.corpus.case import Argument, Draw, Run, case


@case(cast_flat_kernel, "sources: *fp32, copies: *bf16, numel: i64", fused=False)
def cast_of_ours(draw: Draw) -> Run:
    x = draw.patterns(700, dtype=torch.float32)
    return Run(
        {"sources": x, "copies": torch.empty(700).bfloat16(), "numel": 700},
        {"copies": x.bfloat16()},
    )


@case(accumulate_flat_kernel, "accumulators: *bf16, grads: *bf16, numel: i64", fused=False)
def accumulation_of_ours(draw: Draw) -> Run:
    a, g = draw.patterns(700, dtype=torch.bfloat16), draw.patterns(700, dtype=torch.bfloat16)
    want = (a.float() + g.float()).bfloat16()
    return Run({"accumulators": a, "grads": g, "numel": 700}, {"accumulators": want})


@case(
    unscale_flat_kernel,
    "grads: *fp16, inv_scale: *fp32, found_inf: *fp32, numel: i64",
    unaligned=("inv_scale", "found_inf"),
    fused=False,
)
def unscaling_of_ours(draw: Draw) -> Run:
    g = draw.reals(700).half()
    g[601] = math.inf
    want = (g.float() * 0.0123).half()
    scale = torch.tensor([0.0123])
    return Run(
        {"grads": g, "inv_scale": scale, "found_inf": torch.zeros(1), "numel": 700},
        {"grads": want, "found_inf": torch.ones(1)},
    )


@case(
    adam_flat_kernel,
    "param: *fp32, grads: *bf16, exp_avgs: *fp32, exp_avg_sqs: *fp32, copies: *bf16, "
    "coefficients: *fp32, numel: i64, slot: i64",
    constants={"DECOUPLED": True, "HAS_COPY": True},
    unaligned=("coefficients",),
    fused=False,
)
def adamw_of_ours(draw: Draw) -> Run:
    """The equation in torch, one rounding for each operation; the root is taken in float64."""
    n = 700
    p, m, v = draw.reals(n), draw.reals(n), draw.reals(n, low=0.0)
    g = draw.reals(n).bfloat16()
    block = torch.zeros(18)
    block[:9] = torch.tensor([0.01, 0.1, 0.5, 0.0, 0.9, 0.99, 0.1, 0.01, 1e-8])
    block[16:] = torch.tensor([0.3, 0.02])
    lr, wd, factor, _, b1, b2, c1, c2, eps = block[:9]
    f = g.float() * factor
    m1 = b1 * m + c1 * f
    v1 = b2 * v + (c2 * f) * f
    u = (m1 / block[16]) / ((v1 / block[17]).double().sqrt().float() + eps)
    p1 = p - lr * (u + wd * p)
    arguments: dict[str, Argument] = {
        "param": p,
        "grads": g,
        "exp_avgs": m,
        "exp_avg_sqs": v,
        "copies": torch.empty_like(g),
        "coefficients": block,
        "numel": n,
        "slot": 0,
    }
    wants = {"param": p1, "exp_avgs": m1, "exp_avg_sqs": v1, "copies": p1.bfloat16()}
    return Run(arguments, dict(wants))


@case(reduce_flat_kernel, "grads: *fp16, limbs: *i64, numel: i64", warps=8, fused=False)
def exact_norm_of_ours(draw: Draw) -> Run:
    """Small integers: the sum of their squares is below 2^32 and so is one limb, that of 2^0."""
    g = draw.integers(-900, 900, 600).half()
    want = torch.zeros(32, dtype=torch.int64)
    want[11] = int(g.double().square().sum())
    return Run({"grads": g, "limbs": torch.zeros_like(want), "numel": 600}, {"limbs": want})
