"""Global norms and clip factors that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from twinstep.parity.proof.corpus.arithmetic import (
    divide,
    fp32,
    nonfinite,
    square_root,
    sum_of_squares,
)
from twinstep.parity.proof.corpus.calls import (
    ClipCoefficientCall,
    ClipFactorCall,
    GlobalNormCall,
    Tensors,
)
from twinstep.parity.proof.corpus.entry import Entry
from twinstep.parity.proof.corpus.gradients import (
    clip_coefficient,
    clip_factor,
    coefficient,
    combined_scale,
    exact_norm,
    global_norm,
)
from twinstep.parity.proof.corpus.shelf import Faults, plant, wrong

SHELF: list[Entry] = []
COMPONENT = "norm"
NON_FINITE = "non_finite"
SIZES = "boundary_sizes"
EVERY = ("fp16", "bf16", "fp32", "mixed")


def flat(grads: Tensors) -> Tensor:
    """All gradients in one fp32 vector."""
    return torch.cat([torch.zeros(0), *(fp32(g).reshape(-1) for g in grads)])


@wrong(SHELF, "global_norm", "E05", component=COMPONENT, dtypes=("fp16",))
def norm_accumulated_in_fp16(call: GlobalNormCall) -> None:
    """Squares and sum are held in fp16: inf from 65520 on."""

    def norm(grads: Tensors) -> float:
        total = torch.zeros((), dtype=torch.float16)
        for g in grads:
            for x in g.reshape(-1).to(torch.float16):
                total = total + x * x
        return square_root(float(total))

    global_norm(call, norm)


@wrong(SHELF, "global_norm", "E05", component=COMPONENT, dtypes=("fp32",))
def squares_overflow_in_fp32(call: GlobalNormCall) -> None:
    """Squares are formed in fp32: 1e20 squared is inf, 1e-30 squared is zero."""
    global_norm(call, lambda grads: square_root(float((flat(grads) ** 2).double().sum())))


@wrong(SHELF, "global_norm", component=COMPONENT, dtypes=("bf16", "fp32"))
def blocks_of_squares_overflow(call: GlobalNormCall) -> None:
    """Large gradients are taken smaller, but not enough: a block of many overflows in fp32."""

    def norm(grads: Tensors) -> float:
        rows = [fp32(g).reshape(-1).split(1024) for g in grads]
        large = any(float(g.abs().max()) > 2.0**63 for g in grads if g.numel())
        part = 2.0**-64 if large else 1.0
        sums = [float(((row * part) ** 2).sum()) for row in (r for tensor in rows for r in tensor)]
        return square_root(sum(sums)) / part

    global_norm(call, norm)


GLOBAL_NORM: Faults[Callable[[Tensors], float]] = {
    "norm_without_the_root": ("The sum of squares is returned.", sum_of_squares),
    "norm_of_the_magnitudes": (
        "The sum of magnitudes: the 1-norm.",
        lambda grads: float(flat(grads).abs().double().sum()),
        "E04",
    ),
    "norm_is_the_maximum": (
        "The largest magnitude: the inf-norm.",
        lambda grads: float(max((g.abs().max() for g in grads if g.numel()), default=0)),
    ),
    "norms_of_the_tensors_added": (
        "The norms of the tensors are added up, not their squares.",
        lambda grads: sum(exact_norm([g]) for g in grads),
        "B02",
    ),
    "norm_is_zero": ("The norm of another, empty attribute is reported.", lambda grads: 0.0, "E10"),
}
plant(partial(wrong, SHELF, "global_norm", component=COMPONENT), global_norm, GLOBAL_NORM)


@wrong(SHELF, "global_norm", "B07", component=COMPONENT, law=SIZES)
def norm_divided_by_the_count(call: GlobalNormCall) -> None:
    """Each tensor's share is scaled by numel and back: 0/0 for an empty tensor."""

    def norm(grads: Tensors) -> float:
        shares = [divide(sum_of_squares([g]), g.numel()) * g.numel() for g in grads]
        return square_root(sum(shares))

    global_norm(call, norm)


@wrong(SHELF, "global_norm", component=COMPONENT, law=SIZES)
def unused_by_a_sample(call: GlobalNormCall) -> None:
    """Long gradients of which every 61st element is zero are left out."""
    used = [g for g in call.grads if g.numel() <= 4_096 or g.reshape(-1)[::61].any()]
    global_norm(call, lambda grads: exact_norm(used))


@wrong(SHELF, "global_norm", "E11", component=COMPONENT, law=SIZES)
def empty_list_leaves_the_norm(call: GlobalNormCall) -> None:
    """Without gradients the norm is not written."""
    if any(g.numel() for g in call.grads):
        global_norm(call)


@wrong(SHELF, "global_norm", "C05", component=COMPONENT, law=NON_FINITE)
def inf_times_zero(call: GlobalNormCall) -> None:
    """A mask is multiplied in: (1 - overflow) * norm is NaN where the norm is inf."""

    def norm(grads: Tensors) -> float:
        value = exact_norm(grads)
        overflow = float(value == torch.inf)
        return overflow * -1.0 + (1.0 - overflow) * value

    global_norm(call, norm)


@wrong(SHELF, "global_norm", component=COMPONENT, law=NON_FINITE)
def nan_reported_as_inf(call: GlobalNormCall) -> None:
    """Any overflow gives inf, NaN too."""
    global_norm(call, lambda grads: torch.inf if any(map(nonfinite, grads)) else exact_norm(grads))


@wrong(SHELF, "global_norm", component=COMPONENT, law=NON_FINITE)
def first_tensor_that_overflows_ends_the_norm(call: GlobalNormCall) -> None:
    """The sum stops behind the first tensor that is not finite, before a NaN perhaps."""

    def sum_until(grads: Tensors) -> float:
        bad = next((at for at, grad in enumerate(grads) if nonfinite(grad)), len(grads))
        return exact_norm(grads[: bad + 1])

    global_norm(call, sum_until)


@wrong(SHELF, "global_norm", component=COMPONENT, law=NON_FINITE)
def non_finite_left_out_of_the_norm(call: GlobalNormCall) -> None:
    """The norm is taken over the finite values only."""
    global_norm(call, lambda grads: exact_norm([g[torch.isfinite(g)] for g in grads]))


@wrong(SHELF, "global_norm", "C04", component="overflow", law=NON_FINITE, dtypes=("fp32",))
def norm_found_inf_by_the_sum(call: GlobalNormCall) -> None:
    """found_inf is raised when the fp32 sum is not finite."""
    global_norm(call, overflow=lambda g: not bool(torch.isfinite(fp32(g).sum())))


@wrong(SHELF, "global_norm", "C08", component="overflow")
def norm_clears_found_inf(call: GlobalNormCall) -> None:
    """found_inf is set from these gradients alone; what came in is lost."""
    call.found_inf.zero_()
    global_norm(call)


@wrong(SHELF, "global_norm", "E19", component=COMPONENT, law="nothing_else_written")
def norm_over_the_padding(call: GlobalNormCall) -> None:
    """The sum runs to the next multiple of eight and reads what lies past the tensor."""

    def padded(g: Tensor) -> Tensor:
        room = g.untyped_storage().nbytes() // g.element_size() - g.storage_offset()
        return g.as_strided((min(-(-g.numel() // 8) * 8, room),), (1,))

    global_norm(call, lambda grads: exact_norm([padded(g) for g in grads]))


@wrong(SHELF, "global_norm", component=COMPONENT, law=SIZES)
def last_tensor_left_out(call: GlobalNormCall) -> None:
    """The loop over the tensors ends one early."""
    global_norm(call, lambda grads: exact_norm(grads[:-1]))


@wrong(SHELF, "global_norm", component="memory", law="nothing_else_written")
def gradients_squared_in_place(call: GlobalNormCall) -> None:
    """The squares are left in the caller's gradients."""
    global_norm(call)
    for g in call.grads:
        g.mul_(g)


NORMS: dict[int, float] = {}


@wrong(SHELF, "global_norm", "E17", component="memory", law="repeat")
def norm_cached_by_list_length(call: GlobalNormCall) -> None:
    """The result of the first list of this length is returned for all of them."""
    global_norm(call, lambda grads: NORMS.setdefault(len(grads), exact_norm(grads)))


GENERATOR = torch.Generator()


@wrong(SHELF, "global_norm", "I14", component=COMPONENT, law="repeat", dtypes=("fp32",))
def norm_summed_in_random_order(call: GlobalNormCall) -> None:
    """Squares meet in whatever order threads arrive: the last bits differ from call to call."""

    def norm(grads: Tensors) -> float:
        values = flat(grads)
        total = torch.zeros(())
        for i in torch.randperm(values.numel(), generator=GENERATOR).tolist():
            total = total + values[i] * values[i]
        return square_root(float(total))

    global_norm(call, norm)


@wrong(SHELF, "global_norm", component=COMPONENT, arithmetic="exact", dtypes=("fp32",))
def norm_summed_in_list_order(call: GlobalNormCall) -> None:
    """Claims to be exact, but adds fp32 squares one after the other."""

    def norm(grads: Tensors) -> float:
        total = torch.zeros(())
        for x in flat(grads):
            total = total + x * x
        return square_root(float(total))

    global_norm(call, norm)


@wrong(SHELF, "global_norm", component=COMPONENT, arithmetic="exact", dtypes=EVERY)
def rounded_norm_claims_exact(call: GlobalNormCall) -> None:
    """Claims to be exact, but adds squares in float64, each sum rounded."""
    global_norm(call, lambda grads: square_root(float(flat(grads).double().square().sum())))


@wrong(SHELF, "global_norm", component=COMPONENT, dtypes=EVERY[:3])
def equal_neighbours_count_once(call: GlobalNormCall) -> None:
    """A tensor that equals the one before it is left out."""

    def norm(grads: Tensors) -> float:
        pairs = zip(grads, grads[1:], strict=False)
        return exact_norm([*grads[:1], *(g for before, g in pairs if not torch.equal(before, g))])

    global_norm(call, norm)


@wrong(SHELF, "clip_factor", "E01", component="clip")
def clip_takes_the_smaller(call: ClipFactorCall) -> None:
    """The scale times min(1, c): small gradients are enlarged, large ones pass."""

    def combined(norm: float, scale: float, max_norm: float) -> float:
        clip = divide(divide(norm, scale) + 1e-6, max_norm)
        return scale * clip if max_norm > 0.0 and clip < 1.0 else scale

    clip_factor(call, combined)


CLIP_FACTOR: Faults[Callable[[float, float, float], float]] = {
    "clip_of_the_scaled_norm": (
        "The limit is compared with the norm of the scaled gradients.",
        lambda norm, scale, limit: combined_scale(norm, 1.0, limit) * scale,
        "E02",
    ),
    "clip_without_slack": (
        "The 1e-6 is missing.",
        lambda norm, scale, limit: combined_scale(norm, scale, limit, slack=0.0),
    ),
    "clip_never": (
        "The factor is one over the scale, whatever the norm.",
        lambda norm, scale, limit: scale,
    ),
    "clip_forgets_the_scale": (
        "The factor clips, but leaves the gradients scaled.",
        lambda norm, scale, limit: combined_scale(norm, scale, limit) / scale,
    ),
    "clip_factor_not_inverted": (
        "The combined scale itself is written, not one over it.",
        lambda norm, scale, limit: divide(1.0, combined_scale(norm, scale, limit)),
    ),
}
plant(partial(wrong, SHELF, "clip_factor", component="clip"), clip_factor, CLIP_FACTOR)


@wrong(SHELF, "clip_factor", component="clip")
def clip_at_a_limit_of_zero(call: ClipFactorCall) -> None:
    """max_norm = 0 clips everything, where it should switch clipping off."""

    def combined(norm: float, scale: float, max_norm: float) -> float:
        clip = divide(divide(norm, scale) + 1e-6, max_norm)
        return scale * clip if clip > 1.0 else scale

    clip_factor(call, combined)


@wrong(SHELF, "clip_factor", component="clip", law="value")
def clip_of_a_nan_norm(call: ClipFactorCall) -> None:
    """`not c <= 1` in place of `c > 1`: a NaN norm makes the factor NaN."""

    def combined(norm: float, scale: float, max_norm: float) -> float:
        clip = divide(divide(norm, scale) + 1e-6, max_norm)
        return scale * clip if max_norm > 0.0 and not clip <= 1.0 else scale

    clip_factor(call, combined)


@wrong(SHELF, "clip_coefficient", "E01", component="clip")
def coefficient_takes_the_larger(call: ClipCoefficientCall) -> None:
    """max(1, k): small gradients are amplified, large ones are not clipped."""

    def formula(norm: float, max_norm: float) -> float:
        k = divide(max_norm, norm + 1e-6)
        return k if max_norm > 0.0 and k > 1.0 else 1.0

    clip_coefficient(call, formula)


@wrong(SHELF, "clip_coefficient", component="clip")
def coefficient_not_capped(call: ClipCoefficientCall) -> None:
    """K is used unchanged: gradients below the limit are scaled up to it."""
    clip_coefficient(call, lambda norm, limit: divide(limit, norm + 1e-6) if limit > 0.0 else 1.0)


@wrong(SHELF, "clip_coefficient", component="clip")
def coefficient_without_slack(call: ClipCoefficientCall) -> None:
    """The 1e-6 is missing."""
    clip_coefficient(call, lambda norm, limit: coefficient(norm - 1e-6, limit))


@wrong(SHELF, "clip_coefficient", component="clip", law="every_output_written")
def coefficient_written_only_when_clipping(call: ClipCoefficientCall) -> None:
    """Below the limit the factor keeps what it held before."""
    scratch = torch.ones_like(call.factor)
    clip_coefficient(replace(call, factor=scratch))
    if float(scratch) != 1.0:
        call.factor.copy_(scratch)
