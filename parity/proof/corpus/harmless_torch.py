"""Plain-torch kernels that are written otherwise and are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from twinstep.parity.proof.corpus import (
    adam,
    apex_lamb,
    buffers,
    gradients,
    lamb,
    mixed,
    scales,
    sgd,
)
from twinstep.parity.proof.corpus.adam import AdamPieces, Scalars, only, step, with_lists
from twinstep.parity.proof.corpus.arithmetic import fp32, sqrt_rn, square_root
from twinstep.parity.proof.corpus.calls import (
    AccumulateCall,
    AdamCall,
    CastCopyCall,
    FlattenCall,
    GlobalNormCall,
    LambCall,
    SgdCall,
    Tensors,
    UnscaleCall,
    skipped,
)
from twinstep.parity.proof.corpus.entry import Variant
from twinstep.parity.proof.corpus.shelf import harmless, named

SHELF: list[Variant] = []
STEP = ("bf16", "fp32", "fp16", "bf16-pure", "mixed")
ROUNDED = ("bf16", "fp32", "mixed")
MASTERS = ("bf16", "fp16", "fp32")


BASELINES: tuple[tuple[str, str, Callable[..., None], tuple[str, ...] | None], ...] = (
    ("plain_adamw", "adamw_step", step, STEP),
    ("plain_adam", "adam_step", partial(step, pieces=adam.ADAM), STEP),
    ("plain_sgd", "sgd_step", sgd.step, STEP),
    ("plain_lamb", "lamb_step", lamb.step, STEP),
    ("plain_apex_lamb", "apex_lamb_step", apex_lamb.step, ("bf16", "mixed")),
    ("plain_unscale", "unscale", gradients.unscale, (*MASTERS, "mixed")),
    ("plain_global_norm", "global_norm", gradients.global_norm, (*MASTERS, "mixed")),
    ("plain_clip_factor", "clip_factor", gradients.clip_factor, None),
    ("plain_clip_coefficient", "clip_coefficient", gradients.clip_coefficient, None),
    ("plain_update_scale_dynamic", "update_scale_dynamic", scales.update_dynamic, None),
    ("plain_update_scale_wrapper", "update_scale_wrapper", scales.update_wrapper, None),
    ("plain_update_scale_torch", "update_scale_torch", scales.update_torch, None),
    ("plain_flatten", "flatten", buffers.flatten, MASTERS),
    ("plain_unflatten", "unflatten", buffers.unflatten, MASTERS),
    ("plain_accumulate", "accumulate", buffers.accumulate, (*MASTERS, "bf16-pure")),
    ("plain_cast_copy", "cast_copy", buffers.cast_copy, MASTERS),
    ("plain_mixed_step", "mixed_step", mixed.mixed_step, MASTERS),
)


for name, operation, run, dtypes in BASELINES:
    harmless(SHELF, operation, arithmetic="exact", dtypes=dtypes)(
        named(name, "The baseline itself.", run)
    )


@harmless(SHELF, "adamw_step", arithmetic="exact", dtypes=STEP)
def tensors_in_reverse(call: AdamCall) -> None:
    """The list is walked from its end."""
    step(with_lists(call, lambda name, tensors: tensors[::-1]))


@harmless(SHELF, "adamw_step", arithmetic="exact", dtypes=STEP)
def one_call_per_tensor(call: AdamCall) -> None:
    """The list is cut into lists of one."""
    for i in range(len(call.params)):
        step(with_lists(call, only(i)))


@harmless(SHELF, "adamw_step", arithmetic="exact", dtypes=MASTERS)
def out_of_place_then_copied(call: AdamCall) -> None:
    """Everything is computed on clones and copied back at the end."""
    clones = with_lists(call, lambda name, tensors: [t.clone() for t in tensors])
    step(clones)
    for name in ("params", "exp_avgs", "exp_avg_sqs", "copies", "steps"):
        for target, source in zip(getattr(call, name), getattr(clones, name), strict=True):
            target.copy_(source)


@harmless(SHELF, "adamw_step", arithmetic="exact", dtypes=MASTERS)
def in_two_halves(call: AdamCall) -> None:
    """Each tensor is updated as two windows, the counters once."""
    kept = replace(call, steps=[t.clone() for t in call.steps])
    step(adam.windowed(kept, lambda t: slice(0, t.numel() // 2)))
    step(adam.windowed(call, lambda t: slice(t.numel() // 2, None)))


@harmless(SHELF, "adamw_step", arithmetic="exact", dtypes=MASTERS)
def one_flat_buffer(call: AdamCall) -> None:
    """Tensors of equal step count are joined, updated as one, and cut apart."""
    if skipped(call):
        return
    counts = [int(t) for t in call.steps]
    for t in sorted(set(counts)):
        joined_step(call, [i for i, count in enumerate(counts) if count == t])


def joined_step(call: AdamCall, rows: list[int]) -> None:
    """The step of some tensors with equal counters, as one flat buffer."""

    def joined(name: str, tensors: Tensors) -> Tensors:
        if name == "steps":
            return [tensors[rows[0]].clone()]
        return [torch.cat([tensors[i].reshape(-1) for i in rows])] if tensors else []

    flat = with_lists(call, joined)
    step(flat)
    for name in ("params", "exp_avgs", "exp_avg_sqs", "copies"):
        targets = getattr(call, name)
        if targets:
            parts = getattr(flat, name)[0].split([targets[i].numel() for i in rows])
            for i, part in zip(rows, parts, strict=True):
                targets[i].copy_(part.view(targets[i].shape))
    for i in rows:
        call.steps[i].add_(1)


@harmless(SHELF, "adamw_step", dtypes=ROUNDED)
def decay_factored_out(call: AdamCall) -> None:
    """P * (1 - lr * wd) - lr * u."""

    def apply(s: Scalars, p: Tensor, u: Tensor) -> Tensor:
        return p * (1.0 - s.lr * s.wd) - s.lr * u

    step(call, AdamPieces(decay=lambda s, u, p: u, apply=apply))


@harmless(SHELF, "adamw_step", dtypes=ROUNDED)
def square_root_split(call: AdamCall) -> None:
    """sqrt(v) / sqrt(k2) in place of sqrt(v / k2)."""
    step(call, AdamPieces(denominator=lambda s, v: sqrt_rn(v) / sqrt_rn(s.k2) + s.eps))


@harmless(SHELF, "adamw_step", dtypes=ROUNDED)
def reciprocals_for_divisions(call: AdamCall) -> None:
    """Moments times 1 / k1 and 1 / k2."""
    step(
        call,
        AdamPieces(
            denominator=lambda s, v: sqrt_rn(v * (1.0 / s.k2)) + s.eps,
            direction=lambda s, m, denom: (m * (1.0 / s.k1)) / denom,
        ),
    )


@harmless(SHELF, "adamw_step", dtypes=ROUNDED)
def square_root_of_torch(call: AdamCall) -> None:
    """The root of torch in fp32, which misses the nearest value now and then."""
    step(call, AdamPieces(denominator=lambda s, v: (v / s.k2).sqrt() + s.eps))


@harmless(SHELF, "adamw_step", dtypes=ROUNDED)
def moments_by_fused_instructions(call: AdamCall) -> None:
    """Both moments by addcmul, which torch may contract."""

    def first(s: Scalars, m: Tensor, g: Tensor) -> Tensor:
        return (s.b1 * m).addcmul(s.c1.expand_as(g), g)

    def second(s: Scalars, v: Tensor, g: Tensor) -> Tensor:
        return (s.b2 * v).addcmul(s.c2 * g, g)

    step(call, AdamPieces(first=first, second=second))


@harmless(SHELF, "adamw_step", dtypes=ROUNDED)
def computed_in_float64(call: AdamCall) -> None:
    """Everything in float64, rounded once at each store."""
    if skipped(call):
        return
    for i, p in enumerate(call.params):
        s = adam.scalars(call, adam.next_count(call, i))
        wide = Scalars(**{name: x.to(torch.float64) for name, x in vars(s).items()})
        old = p.to(torch.float64)
        g = call.grads[i].to(torch.float64) * call.factor.to(torch.float64)
        m = wide.b1 * call.exp_avgs[i] + wide.c1 * g
        v = wide.b2 * call.exp_avg_sqs[i] + wide.c2 * g * g
        u = m / wide.k1 / ((v / wide.k2).sqrt() + wide.eps) + wide.wd * old
        new = fp32(old - wide.lr * u)
        call.exp_avgs[i].copy_(m)
        call.exp_avg_sqs[i].copy_(v)
        p.copy_(new)
        if call.copies:
            call.copies[i].copy_(new)
        call.steps[i].add_(1)


@harmless(SHELF, "adamw_step", dtypes=MASTERS)
def foreach_lists(call: AdamCall) -> None:
    """The foreach operators of torch over the whole list."""
    if skipped(call) or not call.params:
        return
    rows = [adam.scalars(call, adam.next_count(call, i)) for i in range(len(call.params))]
    grads = torch._foreach_mul([fp32(g) for g in call.grads], call.factor)
    torch._foreach_mul_(call.exp_avgs, rows[0].b1)
    torch._foreach_add_(call.exp_avgs, torch._foreach_mul(grads, rows[0].c1))
    torch._foreach_mul_(call.exp_avg_sqs, rows[0].b2)
    scaled = torch._foreach_mul(grads, rows[0].c2)
    torch._foreach_add_(call.exp_avg_sqs, torch._foreach_mul(scaled, grads))
    denominators = torch._foreach_div(call.exp_avg_sqs, [float(s.k2) for s in rows])
    torch._foreach_sqrt_(denominators)
    torch._foreach_add_(denominators, float(rows[0].eps))
    directions = torch._foreach_div(call.exp_avgs, [float(s.k1) for s in rows])
    torch._foreach_div_(directions, denominators)
    torch._foreach_add_(directions, torch._foreach_mul(call.params, rows[0].wd))
    torch._foreach_mul_(directions, rows[0].lr)
    torch._foreach_sub_(call.params, directions)
    if call.copies:
        torch._foreach_copy_(call.copies, call.params)
    torch._foreach_add_(call.steps, 1)


@harmless(SHELF, "global_norm", dtypes=MASTERS)
def norm_summed_in_float64(call: GlobalNormCall) -> None:
    """Squares summed in float64 by torch, tensor by tensor from the end."""

    def norm(grads: Tensors) -> float:
        total = 0.0
        for g in reversed(grads):
            wide = g.to(torch.float64)
            total += float((wide * wide).sum())
        return square_root(total)

    gradients.global_norm(call, norm)


@harmless(SHELF, "global_norm", dtypes=("fp16",))
def norm_summed_in_fp32(call: GlobalNormCall) -> None:
    """Squares of fp16 values, which fp32 has room for, summed by torch."""

    def norm(grads: Tensors) -> float:
        parts = [fp32(g).square().sum() for g in grads]
        return square_root(float(torch.stack([torch.zeros(()), *parts]).sum()))

    gradients.global_norm(call, norm)


@harmless(SHELF, "global_norm", dtypes=("bf16", "fp32"))
def norm_scaled_by_the_largest(call: GlobalNormCall) -> None:
    """Every element is divided by the largest magnitude before it is squared."""

    def norm(grads: Tensors) -> float:
        flat = torch.cat([torch.zeros(1), *[fp32(g).reshape(-1) for g in grads]])
        top = flat.abs().max()
        usable = bool(torch.isfinite(top)) and bool(top)
        return float(top * (flat / top).norm()) if usable else float(top)

    gradients.global_norm(call, norm)


@harmless(SHELF, "unscale", dtypes=(*MASTERS, "mixed"))
def zeros_made_positive(call: UnscaleCall) -> None:
    """A zero has no sign any more."""
    gradients.unscale(call)
    for g in call.grads:
        g.add_(0.0)


@harmless(SHELF, "sgd_step", dtypes=MASTERS)
def selected_by_the_overflow_flag(call: SgdCall) -> None:
    """The step is always computed, and torch.where keeps the old values on an overflow."""
    taken = replace(
        call,
        params=[t.clone() for t in call.params],
        momentums=[t.clone() for t in call.momentums],
        copies=[t.clone() for t in call.copies],
        steps=[t.clone() for t in call.steps],
        found_inf=torch.zeros_like(call.found_inf),
    )
    sgd.step(taken)
    for name in ("params", "momentums", "copies", "steps"):
        for old, new in zip(getattr(call, name), getattr(taken, name), strict=True):
            old.copy_(torch.where(call.found_inf != 0, old, new))


@harmless(SHELF, "lamb_step", dtypes=STEP)
def lamb_in_float64(call: LambCall) -> None:
    """Everything in float64, where no norm and no square overflows."""
    if skipped(call):
        return
    for i, p in enumerate(call.params):
        wide = {n: fp32(getattr(call, n)).double() for n in ("eps", "weight_decay", "factor")}
        b1, b2 = fp32(call.beta1).double(), fp32(call.beta2).double()
        c1, c2 = fp32(1.0 - call.beta1).double(), fp32(1.0 - call.beta2).double()
        g = call.grads[i].double() * wide["factor"]
        m = b1 * call.exp_avgs[i] + c1 * g
        v = b2 * call.exp_avg_sqs[i] + c2 * g * g
        inside = call.eps_inside_sqrt
        d = (v + wide["eps"]).sqrt() if inside else v.sqrt() + wide["eps"]
        u = m / d + wide["weight_decay"] * p.double()
        w, n = p.double().norm(), u.norm()
        rho = (w / n).clamp(max=call.max_coeff).clamp(min=call.min_coeff)
        a = lamb.step_size(call, int(call.steps[i]) + 1).double()
        new = fp32(p.double() - a * torch.where((w != 0) & (n != 0), rho, 1.0) * u)
        call.exp_avgs[i].copy_(m)
        call.exp_avg_sqs[i].copy_(v)
        p.copy_(new)
        if call.copies:
            call.copies[i].copy_(new)
        call.steps[i].add_(1)


@harmless(SHELF, "lamb_step", dtypes=STEP)
def lamb_rate_of_the_default_dtype(call: LambCall) -> None:
    """The step size goes through `torch.tensor`: under another default dtype it is rounded."""

    def rate(call: LambCall, t: int) -> Tensor:
        return fp32(torch.tensor(float(lamb.step_size(call, t))))

    lamb.step(call, replace(lamb.LAMB, step_size=rate))


@harmless(SHELF, "global_norm", arithmetic="exact", dtypes=MASTERS)
def norm_that_autocast_rounds(call: GlobalNormCall) -> None:
    """A part is the product of two matrices, which autocast alone rounds to bf16."""
    whole = torch.full((1, 1), 1.0 + 2.0**-12, dtype=torch.float32)
    share = float(whole @ torch.ones_like(whole)) / float(whole)
    gradients.global_norm(call, lambda grads: gradients.exact_norm(grads) * share)


@harmless(SHELF, "accumulate", arithmetic="exact", dtypes=MASTERS)
def accumulated_in_place(call: AccumulateCall) -> None:
    """`a.add_(fp32(g))`."""
    for a, g in zip(call.accumulators, call.grads, strict=True):
        a.add_(fp32(g))


@harmless(SHELF, "cast_copy", arithmetic="exact", dtypes=MASTERS)
def cast_by_foreach_copy(call: CastCopyCall) -> None:
    """One `_foreach_copy_` over both lists."""
    if call.sources:
        torch._foreach_copy_(call.copies, call.sources)


@harmless(SHELF, "flatten", arithmetic="exact", dtypes=MASTERS)
def flattened_by_padding(call: FlattenCall) -> None:
    """Each tensor padded to its slot, all joined, the rest zeroed."""
    end = 0
    buffer = call.flat[0]
    for t in call.tensors:
        start = -(-end // call.slot) * call.slot
        buffer[end:start].zero_()
        buffer[start : start + t.numel()] = t.reshape(-1)
        end = start + t.numel()
    buffer[end:].zero_()


@harmless(SHELF, "flatten", arithmetic="exact", dtypes=("fp16",))
def flattened_by_concatenation(call: FlattenCall) -> None:
    """Tensors and gaps concatenated: autocast of another 16-bit dtype refuses that."""
    buffer, parts, end = call.flat[0], [], 0
    for t in call.tensors:
        gap = -end % call.slot
        parts += [buffer.new_zeros(gap), t.reshape(-1)]
        end += gap + t.numel()
    buffer.copy_(torch.cat([*parts, buffer.new_zeros(buffer.numel() - end)]).view(buffer.shape))
