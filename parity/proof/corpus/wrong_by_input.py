"""Kernels that are wrong on one kind of input alone: customary, large, late or many.

Each is right wherever else a test is likely to look.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from twinstep.parity.proof.corpus.adam import (
    AdamPieces,
    Scalars,
    next_count,
    scalars,
    step,
    with_lists,
)
from twinstep.parity.proof.corpus.arithmetic import nonfinite
from twinstep.parity.proof.corpus.buffers import accumulate, cast_copy
from twinstep.parity.proof.corpus.calls import (
    AccumulateCall,
    AdamCall,
    CastCopyCall,
    ClipFactorCall,
    DynamicCall,
    GlobalNormCall,
    MixedCall,
    SgdCall,
    Tensors,
    UnscaleCall,
)
from twinstep.parity.proof.corpus.entry import Entry
from twinstep.parity.proof.corpus.gradients import clip_factor, exact_norm, global_norm, unscale
from twinstep.parity.proof.corpus.mixed import MixedPieces, mixed_step, move_scale
from twinstep.parity.proof.corpus.scales import update_dynamic
from twinstep.parity.proof.corpus.sgd import step as sgd_step
from twinstep.parity.proof.corpus.shelf import wrong

SHELF: list[Entry] = []
LARGE, TABLE = 2**18, 1_280 * 1_024
TILE, BYTE = 12_288, 256
WORD = 2**31
adamw = partial(wrong, SHELF, "adamw_step")
value = partial(wrong, SHELF)


def betas(call: AdamCall) -> tuple[float, float]:
    """Both betas as numbers."""
    return float(call.beta1), float(call.beta2)


@adamw(component="customary")
def usual_betas_from_a_table(call: AdamCall) -> None:
    """For betas of 0.9 and 0.999 it takes 1 - beta from a table in fp32."""

    def tabled(call: AdamCall, t: int) -> Scalars:
        s = scalars(call, t)
        return replace(s, c2=1.0 - s.b2) if betas(call) == (0.9, 0.999) else s

    step(call, AdamPieces(scalars=tabled))


@adamw(component="customary")
def later_betas_swapped(call: AdamCall) -> None:
    """For betas of 0.9 and 0.95 the corrections are swapped."""

    def swapped(call: AdamCall, t: int) -> Scalars:
        s = scalars(call, t)
        return replace(s, k1=s.k2, k2=s.k1) if betas(call) == (0.9, 0.95) else s

    step(call, AdamPieces(scalars=swapped))


@adamw(component="customary")
def usual_eps_left_out(call: AdamCall) -> None:
    """An eps of 1e-8 is taken for the default that needs no addition."""
    usual = float(call.eps) == 1e-8
    step(replace(call, eps=torch.zeros_like(call.eps)) if usual else call)


@adamw(component="customary")
def usual_eps_hard_coded(call: AdamCall) -> None:
    """Eps is 1e-8, whatever is asked for."""
    step(replace(call, eps=torch.full_like(call.eps, 1e-8)))


@adamw(component="customary")
def usual_betas_hard_coded(call: AdamCall) -> None:
    """The betas are 0.9 and 0.999, whatever is asked for."""
    beta1, beta2 = torch.full_like(call.beta1, 0.9), torch.full_like(call.beta2, 0.999)
    step(replace(call, beta1=beta1, beta2=beta2))


@adamw(component="many")
def tensors_numbered_by_a_byte(call: AdamCall) -> None:
    """The number of a tensor is a byte: the 257th reads the gradient of the first."""
    pairs = [(call.grads[at % BYTE], own) for at, own in enumerate(call.grads)]
    # One that is shorter would be read past its end.
    near = [one.reshape(-1)[: own.numel()] for one, own in pairs]
    read = [
        part.reshape(own.shape) if part.numel() == own.numel() else own
        for part, (_, own) in zip(near, pairs, strict=True)
    ]
    step(replace(call, grads=read))


@adamw(component="counters")
def correction_ends_after_ten_means(call: AdamCall) -> None:
    """After 10 / (1 - beta2) steps the second correction is taken for 1; 4.5e-5 are missing."""

    def ended(call: AdamCall, t: int) -> Scalars:
        s = scalars(call, t)
        return replace(s, k2=torch.ones_like(s.k2)) if t * float(s.c2) > 10.0 else s

    step(call, AdamPieces(scalars=ended))


@adamw(component="customary")
def usual_decay_coupled(call: AdamCall) -> None:
    """A decay of 0.01 enters the gradient: the branch for the default is Adam's."""
    step(call, AdamPieces(decoupled=float(call.weight_decay) != 0.01))


@adamw(component="customary")
def rate_taken_without_its_sign(call: AdamCall) -> None:
    """A negative learning rate descends."""
    step(replace(call, lr=call.lr.abs()))


@adamw(component="customary")
def rate_clamped_at_ten(call: AdamCall) -> None:
    """A learning rate above 10 is taken for a mistake."""
    step(replace(call, lr=call.lr.clamp(max=10.0)))


@value("sgd_step", component="customary")
def usual_momentum_accumulates(call: SgdCall) -> None:
    """With a momentum of 0.9 the dampening is forgotten."""
    usual = float(call.momentum) == 0.9
    sgd_step(replace(call, dampening=torch.zeros_like(call.dampening)) if usual else call)


@adamw(component="overflow", law="skipped_step")
def overflow_without_a_scale_ignored(call: AdamCall) -> None:
    """A factor of 1 means that nothing was scaled, and so that nothing overflowed."""
    unscaled = float(call.factor) == 1.0
    step(replace(call, found_inf=torch.zeros_like(call.found_inf)) if unscaled else call)


@value("unscale", component="overflow", law="non_finite")
def scale_of_one_returns_early(call: UnscaleCall) -> None:
    """With an inverse scale of 1 nothing is done, and overflow is not looked for."""
    if float(call.inv_scale) != 1.0:
        unscale(call)


@value("clip_factor", component="norms", arithmetic="exact")
def limit_of_one_without_its_slack(call: ClipFactorCall) -> None:
    """A limit of 1 under a scale of 1 takes the norm itself, without 1e-6."""
    plain = float(call.max_norm) == 1.0 == float(call.scale) and float(call.norm) > 1.0
    clip_factor(call)
    if plain:
        call.factor.copy_(1.0 / call.norm.double())


@value("update_scale_dynamic", component="loss scale")
def floor_of_one_is_no_floor(call: DynamicCall) -> None:
    """At a floor of 1 the scale stays without an error: 1 means that there is no floor."""
    error = call.raise_error_at_min_scale and float(call.min_scale) != 1.0
    update_dynamic(replace(call, raise_error_at_min_scale=error))


@value("update_scale_dynamic", component="counters")
def iterations_of_32_bits(call: DynamicCall) -> None:
    """The number of the iteration is an int32."""
    update_dynamic(call)
    call.cur_iter.copy_(call.cur_iter.to(torch.int32))


@value("update_scale_dynamic", component="counters")
def iterations_in_float64(call: DynamicCall) -> None:
    """The clean steps are counted in float64, where neighbours above 2^53 are one number."""
    clean = int(float(call.cur_iter) - float(call.last_overflow_iter) - 1)
    late = replace(call, cur_iter=call.last_overflow_iter + clean + 1)
    update_dynamic(late)
    call.cur_iter.add_(1)


@value("mixed_step", component="loss scale", law="skipped_step")
def exhausted_at_a_floor_of_one_forgotten(call: MixedCall) -> None:
    """An overflow at the floor is reported, but for the dynamic rule at a scale of 1."""
    known = call.exhausted.clone()

    def quiet(call: MixedCall) -> None:
        at_one = call.rule == "dynamic" and float(call.scale) == 1.0
        move_scale(call)
        if at_one:
            call.exhausted.copy_(known)

    mixed_step(call, MixedPieces(move_scale=quiet))


@adamw(component="counters")
def steps_of_32_bits(call: AdamCall) -> None:
    """A step counter passes through int32."""
    step(call, AdamPieces(count=lambda call, i: next_count(call, i) % WORD))
    for t in call.steps:
        t.copy_(t.to(torch.int32))


def first_elements(call: AdamCall, count: int) -> None:
    """A step after which the weights beyond so many elements are as they were."""
    kept = [(p, p.view(-1)[count:].clone()) for p in call.params]
    step(call)
    for tensor, old in kept:
        tensor.view(-1)[count:] = old


@adamw(component="sizes")
def elements_beyond_the_grid_left(call: AdamCall) -> None:
    """The grid has 256 blocks of 1,024 and no loop: what lies beyond stays as it was."""
    first_elements(call, LARGE)


@adamw(component="sizes")
def chunks_beyond_the_table_left(call: AdamCall) -> None:
    """The table of a launch has 1,280 chunks of 1,024, and a tensor has one launch."""
    first_elements(call, TABLE)


@value("global_norm", component="sizes")
def norm_of_the_first_blocks(call: GlobalNormCall) -> None:
    """The scratch of partial sums has 256 entries of 1,024 elements for each tensor."""
    global_norm(call, lambda grads: exact_norm([g.view(-1)[:LARGE] for g in grads]))


@adamw(component="sizes")
def ends_of_wide_rows_left(call: AdamCall) -> None:
    """One block of 4,096 for each row of a matrix: what lies behind in a longer row is left."""
    rows = [p.view(p.shape[0], -1) for p in call.params if p.dim() > 1 and p.numel()]
    kept = [(row, row[:, 4096:].clone()) for row in rows]
    step(call)
    for row, old in kept:
        row[:, 4096:] = old


@value("global_norm", component="many")
def norm_of_the_last_320(call: GlobalNormCall) -> None:
    """Partial sums have 320 places, and are stored where they should be added."""
    global_norm(call, lambda grads: exact_norm(grads[-320:]))


@value("global_norm", component="values")
def norm_by_the_reciprocal_of_the_largest(call: GlobalNormCall) -> None:
    """Gradients are multiplied by 1 / max |g|, which is infinite for a maximum below 2^-128."""

    def scaled(grads: Tensors) -> float:
        largest = max((float(g.abs().max()) for g in grads if g.numel()), default=0.0)
        return math.inf if 0.0 < largest < 2.0**-128 else exact_norm(grads)

    global_norm(call, scaled)


@value("unscale", component="sizes")
def overflow_beyond_the_grid_unseen(call: UnscaleCall) -> None:
    """Gradients beyond 2^18 elements are searched for overflow, but not unscaled."""
    unscale(replace(call, grads=[g.view(-1)[:LARGE] for g in call.grads]))
    for g in call.grads:
        if nonfinite(g):
            call.found_inf.fill_(1.0)


@value("unscale", component="sizes")
def overflow_of_the_last_piece_alone(call: UnscaleCall) -> None:
    """Pieces of 2^20 elements, of which each replaces what the one before has found."""
    before = call.found_inf.clone()
    unscale(call)
    pieces = [g.view(-1).split(4 * LARGE)[-1] for g in call.grads if g.numel()]
    call.found_inf.copy_(max([before, *(before.new_tensor(float(nonfinite(g))) for g in pieces)]))


@value("accumulate", component="sizes")
def sums_beyond_the_grid_rounded_down(call: AccumulateCall) -> None:
    """The second wave of blocks adds nothing."""
    kept = [(a, a.view(-1)[LARGE:].clone()) for a in call.accumulators]
    accumulate(call)
    for tensor, old in kept:
        tensor.view(-1)[LARGE:] = old


@value("cast_copy", component="rounding", law="non_finite")
def full_nan_carried_to_zero(call: CastCopyCall) -> None:
    """Rounds by an addition to the bits, then makes NaNs quiet: one of all ones is -0 by then."""
    for source, copy in zip(call.sources, call.copies, strict=True):
        words = source.float().contiguous().view(torch.int32).long() & 0xFFFFFFFF
        high = (words + 0x7FFF + (words >> 16 & 1)) >> 16 & 0xFFFF
        high = torch.where(source.isnan(), high | 0x40, high)
        # As a signed number of 16 bits.
        signed = (high ^ 0x8000) - 0x8000
        copy.copy_(signed.to(torch.int16).view(torch.bfloat16))


@value("cast_copy", component="sizes")
def scalars_left_uncast(call: CastCopyCall) -> None:
    """A tensor without dimensions has no rows to walk over."""
    rows = [(s, c) for s, c in zip(call.sources, call.copies, strict=True) if s.dim()]
    cast_copy(replace(call, sources=[s for s, _ in rows], copies=[c for _, c in rows]))


@adamw(component="shapes")
def scalar_weights_left(call: AdamCall) -> None:
    """Weights without dimensions are taken for counters: they get no gradient."""

    def without(name: str, tensors: Tensors) -> Tensors:
        if name != "grads":
            return tensors
        return [g if g.dim() else torch.zeros_like(g) for g in tensors]

    step(with_lists(call, without))


@adamw(component="shapes")
def kernels_of_convolutions_transposed(call: AdamCall) -> None:
    """Gradients in four dimensions are taken to be channels last."""

    def turned(name: str, tensors: Tensors) -> Tensors:
        return [_turned(t) for t in tensors] if name == "grads" else tensors

    step(with_lists(call, turned))


def _turned(grad: Tensor) -> Tensor:
    return grad.permute(0, 2, 3, 1).reshape(grad.shape) if grad.dim() == 4 else grad


@adamw(component="shapes")
def weights_by_their_first_axis(call: AdamCall) -> None:
    """Of weights in three dimensions only the first column is updated."""
    kept = [(p, p.clone()) for p in call.params if p.dim() == 3]
    step(call)
    for p, old in kept:
        p[:, 1:] = old[:, 1:]


@adamw(component="shapes")
def frozen_weights_updated_alone(call: AdamCall) -> None:
    """Weights that require gradients are copied first, and the copy is updated."""
    step(replace(call, params=[p.clone() if p.requires_grad else p for p in call.params]))


@adamw(component="sizes")
def equal_tensors_stacked(call: AdamCall) -> None:
    """Tensors of one size are stacked, and the stack has the first one's step count."""
    sizes = {p.numel() for p in call.params}
    stacked = len(call.params) > 2 and len(sizes) == 1
    first = int(call.steps[0]) + 1 if stacked else 0
    count = (lambda call, i: first) if stacked else next_count
    step(call, AdamPieces(count=count))


@adamw("A04", component="sizes", law="boundary_sizes")
def second_tile_overwrites_the_first(call: AdamCall) -> None:
    """Beyond one staging tile the gradient of the tile before is used again."""

    def staged(name: str, tensors: Tensors) -> Tensors:
        return [_restaged(t) for t in tensors] if name == "grads" else tensors

    step(with_lists(call, staged))


def _restaged(grad: Tensor) -> Tensor:
    flat = grad.clone().view(-1)
    rest = flat.numel() - TILE
    if rest > 0:
        flat[TILE:] = flat[:rest].clone()
    return flat.view(grad.shape)


@wrong(SHELF, "adamw_step", component="layout", law="alignment", dtypes=("bf16", "fp16"))
def copies_stored_in_fours_anywhere(call: AdamCall) -> None:
    """Copies that begin off 8 bytes, beside weights and moments that do not, lose an element."""
    others = zip(call.params, call.exp_avgs, call.exp_avg_sqs, strict=True)
    wide = [all(t.data_ptr() % 16 == 0 for t in three) for three in others]
    lost = [c for c, four in zip(call.copies, wide, strict=False) if four and c.data_ptr() % 8]
    kept = [(c, c.view(-1)[:1].clone()) for c in lost]
    step(call)
    for copy, old in kept:
        copy.view(-1)[:1] = old
