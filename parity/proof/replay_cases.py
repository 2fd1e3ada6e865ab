"""Our kernels' part of replay's corpus, handed to it by `--also parity.proof.replay_cases`.

The texts are in replay's archive, of the kernels as they were when the corpus was made.
"""

import math

import torch
from torch import Tensor

from twinstep.fast.kernels.accumulate import accumulate_flat_kernel
from twinstep.fast.kernels.cast import cast_flat_kernel
from twinstep.fast.kernels.finalise_unscaled import CONTROLS, finalise_unscaled_kernel
from twinstep.fast.kernels.reduce import reduce_flat_kernel
from twinstep.fast.kernels.unscale import unscale_flat_kernel
from twinstep.parity.proof.frozen_kernels import (
    adam_flat_kernel,
    lamb_ratio_kernel,
)
from twinstep.replay.corpus.case import Argument, Draw, Run, case


@case(cast_flat_kernel, "sources: *fp32, copies: *bf16, numel: i64", fused=False)
def cast_of_ours(draw: Draw) -> Run:
    """Every pattern rounds as torch rounds it."""
    x = draw.patterns(700, dtype=torch.float32)
    return Run(
        {"sources": x, "copies": torch.empty(700).bfloat16(), "numel": 700},
        {"copies": x.bfloat16()},
    )


@case(accumulate_flat_kernel, "accumulators: *bf16, grads: *bf16, numel: i64", fused=False)
def accumulation_of_ours(draw: Draw) -> Run:
    """The sum in fp32, rounded once."""
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
    """The product in fp32, rounded once; an infinity raises the flag."""
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


LIMBS = "grads: *{}, limbs: *i64, numel: i64"


@case(reduce_flat_kernel, LIMBS.format("fp16"), constants={"KIND": "2"}, warps=8, fused=False)
def exact_norm_of_ours(draw: Draw) -> Run:
    """Small integers: the sum of their squares is below 2^32 and so is one limb, that of 2^0."""
    g = draw.integers(-900, 900, 600).half()
    want = torch.zeros(32, dtype=torch.int64)
    want[11] = int(g.double().square().sum())
    return Run({"grads": g, "limbs": torch.zeros_like(want), "numel": 600}, {"limbs": want})


@case(reduce_flat_kernel, LIMBS.format("fp32"), constants={"KIND": "1"}, warps=8, fused=False)
def exact_sum_of_ours(draw: Draw) -> Run:
    """Multiples of 2^-32 below 2^-22: their sum is below 1 and so is one limb, that of 2^-32."""
    units = draw.integers(-(2**10), 2**10, 600, dtype=torch.int64)
    g = (units.double() * 2.0**-32).float()
    want = torch.zeros(32, dtype=torch.int64)
    want[10] = int(units.abs().sum())
    return Run({"grads": g, "limbs": torch.zeros_like(want), "numel": 600}, {"limbs": want})


@case(reduce_flat_kernel, LIMBS.format("bf16"), constants={"KIND": "inf"}, warps=8, fused=False)
def largest_magnitude_of_ours(draw: Draw) -> Run:
    """The bits of the largest magnitude as fp32."""
    g = draw.reals(600).bfloat16()
    want = torch.zeros(32, dtype=torch.int64)
    want[25] = int(g.float().abs().max().view(torch.int32))
    return Run({"grads": g, "limbs": torch.zeros_like(want), "numel": 600}, {"limbs": want})


def root(total: int) -> Tensor:
    """The square root in float64, rounded to fp32."""
    return torch.tensor(math.sqrt(total)).float()


@case(
    lamb_ratio_kernel,
    "coefficients: *fp32, limbs: *i64, ratios: *fp32",
    constants={"KEEPS": True},
    grid=(4,),
    warps=1,
    unaligned=("coefficients", "ratios"),
    fused=False,
)
def trust_ratios_of_ours(draw: Draw) -> Run:
    """|p| / |u| in bounds, above, below, and 1 where a norm is 0; times the step size."""
    pairs = [(10, 7), (90_000, 3), (2, 100_000), (0, 5)]
    limbs = torch.zeros(4, 2, 32, dtype=torch.int64)
    limbs[:, :, 11] = torch.tensor(pairs)
    block = torch.zeros(16 + 2 * len(pairs))
    block[11], block[12] = 10.0, 0.01
    block[16::2] = draw.reals(4, low=0.001, high=0.1)
    inside = root(pairs[0][0]) / root(pairs[0][1])
    ratios = torch.stack([inside, block[11], block[12], torch.ones(())])
    want = block.clone()
    want[17::2] = block[16::2] * ratios
    return Run(
        {"coefficients": block, "limbs": limbs, "ratios": torch.zeros(4)},
        {"coefficients": want, "ratios": ratios},
    )


@case(
    finalise_unscaled_kernel,
    "limbs: *i64, step: *i64, coefficients: *fp32, lr: *fp64, beta1: *fp64, beta2: *fp64, "
    "eps: *fp64, weight_decay: *fp64, max_norm: *fp64, norm: *fp32, found_inf: *fp32, "
    "factor: *fp32",
    constants={"KIND": "2", "BIAS_CORRECTION": True, "AHEAD": False, "LAST": True},
    unaligned=("limbs", "step", "coefficients", *CONTROLS),
    fused=False,
)
def finalising_of_ours(draw: Draw) -> Run:
    """A sum over two limbs; hyper-parameters and powers in float64, each rounded once."""
    limbs = torch.zeros(32, dtype=torch.int64)
    limbs[11], limbs[12] = 123_456, 7
    lr, b1, b2, eps, wd, largest = 1e-3, 0.9, 0.999, 1e-8, 0.01, 0.5
    norm = root(7 * 2**32 + 123_456)
    factor = largest / (float(norm) + 1e-6)
    powers = [b1 * b1 * ((b1 * b1) * (b1 * b1)), b2 * b2 * ((b2 * b2) * (b2 * b2))]  # t = 6
    wanted = [lr, wd, factor, 0.0, b1, b2, 1 - b1, 1 - b2, eps]
    want = torch.zeros(18, dtype=torch.float64)
    want[:9] = torch.tensor(wanted, dtype=torch.float64)
    want[16:] = torch.tensor([1 - power for power in powers], dtype=torch.float64)
    names = ("lr", "beta1", "beta2", "eps", "weight_decay", "max_norm")
    given = zip(names, (lr, b1, b2, eps, wd, largest), strict=True)
    arguments: dict[str, Argument] = {
        "limbs": limbs,
        "step": torch.tensor([5]),
        "coefficients": torch.zeros(18),
        **{name: torch.tensor([value], dtype=torch.float64) for name, value in given},
        **{name: torch.full((1,), 3.0) for name in ("norm", "found_inf", "factor")},
    }
    wants = {
        "limbs": torch.zeros_like(limbs),
        "step": torch.tensor([6]),
        "coefficients": want.float(),
        "norm": norm.reshape(1),
        "found_inf": torch.zeros(1),
        "factor": torch.tensor([factor]).float(),
    }
    return Run(arguments, dict(wants))
