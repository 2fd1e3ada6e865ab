"""AdamW on one tensor by a Triton kernel, and in plain torch, with a place where a fault goes."""

from collections.abc import Callable
from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from twinstep.parity.operations.table import operation_named
from twinstep.parity.proof.mutate.sites import Mutant, mutants
from twinstep.parity.registry.kernels import Kernel


@triton.jit
def _adamw_kernel(
    param, grad, exp_avg, exp_avg_sq, steps, lr_, beta1_, beta2_, eps_, decay_, factor_, found_,
    n, FAULT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(found_) != 0.0:
        return
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    p = tl.load(param + at, mask=here)
    g = tl.load(grad + at, mask=here).to(tl.float32)
    m = tl.load(exp_avg + at, mask=here)
    v = tl.load(exp_avg_sq + at, mask=here)
    factor = tl.load(factor_)
    beta1, beta2 = tl.load(beta1_), tl.load(beta2_)
    lr, wd, eps = tl.load(lr_).to(tl.float32), tl.load(decay_).to(tl.float32), tl.load(eps_)
    b1, b2 = beta1.to(tl.float32), beta2.to(tl.float32)
    c1, c2 = (1.0 - beta1).to(tl.float32), (1.0 - beta2).to(tl.float32)
    if FAULT == "factor of one":
        g = tl.where(factor == 1.0, g * 1.0000001, g * factor)
    elif FAULT == "large rate" and lr > 10.0:
        g = g * factor * 2.0
    else:
        g = g * factor
    if FAULT == "small beta":
        b1 = tl.where(b1 < 0.5, b1 * 0.5, b1)
    if FAULT == "one value":
        g = tl.where(g == 0.33325195, 0.3333, g)
    m = b1 * m + c1 * g
    v = b2 * v + (c2 * g) * g
    e = eps.to(tl.float32)
    if FAULT == "reciprocal":
        u = m * (1.0 / (tl.sqrt_rn(v) + e))
    elif FAULT == "halved":
        u = tl.div_rn(m + m, tl.sqrt_rn(v) + e) * 0.5
    else:
        u = tl.div_rn(m, tl.sqrt_rn(v) + e)
    u = u + wd * p
    tl.store(param + at, p - lr * u, mask=here)
    tl.store(exp_avg + at, m, mask=here)
    tl.store(exp_avg_sq + at, v, mask=here)
    if tl.program_id(0) == 0:
        tl.store(steps, tl.load(steps) + 1)


@triton.jit
def _unscale_kernel(g, inv_scale, found, n, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(g + at, mask=at < n, other=0.0)
    finite = tl.abs(x) < float("inf")
    kept = x if SIGNED else tl.abs(x)
    tl.store(g + at, tl.where(finite, x * tl.load(inv_scale), kept), mask=at < n)
    if tl.min(finite.to(tl.int32), 0) == 0:
        tl.store(found, 1.0)


def infinities_stay(signed: bool) -> Kernel:
    """Unscale that leaves what is not finite as it is, or without its sign."""

    def unscale(grads: list[Tensor], *, inv_scale: Tensor, found_inf: Tensor) -> None:
        for g in grads:
            _unscale_kernel[(triton.cdiv(g.numel(), 64),)](
                g, inv_scale, found_inf, g.numel(), SIGNED=signed, BLOCK=64
            )

    return replace(row(unscale, "replay"), operation=operation_named("unscale", "tests"))


def by_triton(fault: str = "") -> Callable[..., None]:
    def adamw(
        params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor], copies: list[Tensor], steps: list[Tensor], *,
        lr: Tensor, beta1: Tensor, beta2: Tensor, eps: Tensor, weight_decay: Tensor,
        factor: Tensor, found_inf: Tensor, bias_correction: bool,
    ) -> None:  # fmt: skip
        del copies, bias_correction
        lists = (params, grads, exp_avgs, exp_avg_sqs, steps)
        given = [tensors[0] for tensors in lists]
        n = given[0].numel()
        _adamw_kernel[(triton.cdiv(n, 64),)](
            *given, lr, beta1, beta2, eps, weight_decay, factor, found_inf, n,
            FAULT=fault, BLOCK=64, enable_fp_fusion=fault == "contracted",
        )  # fmt: skip

    return adamw


def by_torch(fault: str = "") -> Callable[..., None]:
    def adamw(
        params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor], copies: list[Tensor], steps: list[Tensor], *,
        lr: Tensor, beta1: Tensor, beta2: Tensor, eps: Tensor, weight_decay: Tensor,
        factor: Tensor, found_inf: Tensor, bias_correction: bool,
    ) -> None:  # fmt: skip
        del copies, bias_correction
        if found_inf.item():
            return
        rows = zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True)
        for p, grad, m, v, step in rows:
            g = grad.float() * factor
            if fault == "branch" and factor.item() > 3.0:
                g = grad.float() / (1.0 / factor)
            if fault.startswith("other"):
                in_usual_style(
                    p, g, m, v, [x.item() for x in (lr, beta1, beta2, eps, weight_decay)], fault
                )
                step += 1
                continue
            m.mul_(beta1.float()).add_((1 - beta1).float() * g)
            square = ((1 - beta2).float() * g) * g
            v.mul_(beta2.float()).add_(square)
            root = v.double().sqrt().float()
            u = m / (root + eps.float()) + weight_decay.float() * p
            if fault == "fused":
                p.addcmul_(lr.float().neg(), u)
            else:
                p.sub_(lr.float() * u)
            step += 1

    return adamw


def in_usual_style(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: list[float], fault: str
) -> None:
    lr, beta1, beta2, eps, decay = numbers
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    p.mul_(1 - lr * decay)
    root = v.sqrt().add_(eps * 100 if fault == "other formula" else eps)
    p.addcdiv_(m, root, value=-lr)


def row(function: Callable[..., None], engine: str) -> Kernel:
    return Kernel(
        name="mine", operation=operation_named("adamw_step", "tests"), function=function,
        arithmetic="exact", dtypes=("fp32",), layouts=("flat",), engines=(engine,), place="",
    )  # fmt: skip


def planted(function: str, before: str) -> Mutant | None:
    """The first fault of arithmetic that replaces an expression."""
    for mutant in mutants().values():
        if (mutant.function, mutant.before, mutant.rule) == (function, before, "operator"):
            return mutant
    return None
