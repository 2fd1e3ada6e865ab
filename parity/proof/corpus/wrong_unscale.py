"""Unscale kernels that are wrong: what raises found_inf, and what is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from twinstep.parity.proof.corpus.arithmetic import fp32, nonfinite
from twinstep.parity.proof.corpus.calls import UnscaleCall
from twinstep.parity.proof.corpus.entry import Entry
from twinstep.parity.proof.corpus.gradients import unscale
from twinstep.parity.proof.corpus.shelf import Faults, plant, wrong

SHELF: list[Entry] = []
COMPONENT = "overflow"
NON_FINITE = "non_finite"


def write_flag(call: UnscaleCall, value: float) -> None:
    """Unscale the gradients and put `value` where the flag belongs."""
    unscale(replace(call, found_inf=torch.zeros_like(call.found_inf)))
    call.found_inf.fill_(value)


@wrong(SHELF, "unscale", "C08", component=COMPONENT, law=NON_FINITE, dtypes=("mixed",))
def later_tensor_clears_found_inf(call: UnscaleCall) -> None:
    """Each tensor overwrites the flag, so only the last one counts."""
    flags = [nonfinite(g) for g in call.grads]
    write_flag(call, float(flags[-1]) if flags else float(call.found_inf))


@wrong(SHELF, "unscale", component=COMPONENT)
def incoming_found_inf_cleared(call: UnscaleCall) -> None:
    """The flag of an earlier group is overwritten: set, not or-ed."""
    write_flag(call, float(any(nonfinite(g) for g in call.grads)))


@wrong(SHELF, "unscale", "C04", component=COMPONENT, law=NON_FINITE, dtypes=("fp32",))
def found_inf_by_the_sum(call: UnscaleCall) -> None:
    """Finiteness is read from the fp32 sum, which overflows over finite values."""
    unscale(call, lambda g: not bool(torch.isfinite(fp32(g).sum())))


@wrong(SHELF, "unscale", component=COMPONENT, law=NON_FINITE)
def flags_of_the_last_launch(call: UnscaleCall) -> None:
    """Each launch takes 64 tensors and clears the flags, which are read behind the last one."""
    last = (len(call.grads) - 1) // 64 * 64
    found = any(nonfinite(g) for g in call.grads[max(last, 0) :])
    write_flag(call, max(float(found), float(call.found_inf)))


UNSCALE_NON_FINITE: Faults[Callable[[Tensor], bool]] = {
    "nan_not_detected": ("Only infinities raise found_inf.", lambda g: bool(torch.isinf(g).any())),
    "inf_not_detected": ("Only NaN raises found_inf: `g != g`.", lambda g: bool((g != g).any())),
    "negative_inf_not_detected": (
        "The maximum is taken without the magnitude: -inf passes.",
        lambda g: bool(torch.isnan(g).any()) or bool((g == torch.inf).any()),
    ),
    "bf16_not_checked": (
        "bf16 needs no loss scale, so it is not checked either.",
        lambda g: g.dtype != torch.bfloat16 and nonfinite(g),
        "C17",
    ),
    "last_element_not_checked": (
        "The search ends one element early.",
        lambda g: nonfinite(g.reshape(-1)[:-1]),
    ),
    "head_off_alignment_not_checked": (
        "The elements before the first address divisible by 16 are left out of the search.",
        lambda g: nonfinite(g.reshape(-1)[-g.data_ptr() % 16 // g.element_size() :]),
    ),
}
plant(
    partial(wrong, SHELF, "unscale", component=COMPONENT, law=NON_FINITE),
    unscale,
    UNSCALE_NON_FINITE,
)


@wrong(SHELF, "unscale", component="sizes", law="boundary_sizes")
def elements_counted_by_the_first_stride(call: UnscaleCall) -> None:
    """The first size times its stride counts elements: three NaN behind a tensor of (3, 0)."""
    unscale(call, lambda g: nonfinite(g) or (g.dim() > 0 and g.size(0) * g.stride(0) > g.numel()))


@wrong(SHELF, "unscale", component=COMPONENT, law=NON_FINITE)
def nan_ignored_by_the_maximum(call: UnscaleCall) -> None:
    """A maximum that prefers numbers to NaN decides: NaN is dropped."""

    def overflow(g: Tensor) -> bool:
        largest = torch.zeros(())
        for x in fp32(g).abs().view(-1):
            largest = torch.fmax(largest, x)
        return bool(torch.isinf(largest))

    unscale(call, overflow)


@wrong(SHELF, "unscale", component=COMPONENT, law=NON_FINITE, dtypes=("fp32",))
def overflow_tested_after_the_product(call: UnscaleCall) -> None:
    """The product with inv_scale is tested: a finite gradient may raise the flag."""
    unscale(call, lambda g: nonfinite(fp32(g) * call.inv_scale))


@wrong(SHELF, "unscale", component=COMPONENT, law=NON_FINITE, dtypes=("fp32",))
def overflow_tested_in_fp16(call: UnscaleCall) -> None:
    """The gradient goes to fp16 before it is tested: 65520 raises the flag."""
    unscale(call, lambda g: nonfinite(g.to(torch.float16)))


@wrong(SHELF, "unscale", component=COMPONENT, law=NON_FINITE)
def first_tensor_checked_only(call: UnscaleCall) -> None:
    """Only the first tensor of the list is tested."""
    first = call.grads[0].data_ptr() if call.grads else 0
    unscale(call, lambda g: g.data_ptr() == first and nonfinite(g))


@wrong(SHELF, "unscale", component=COMPONENT, law=NON_FINITE)
def found_inf_counts(call: UnscaleCall) -> None:
    """The flag holds how many values are not finite, where one is promised."""
    count = sum(int((~torch.isfinite(g)).sum()) for g in call.grads)
    write_flag(call, float(count) if count else float(call.found_inf))


@wrong(SHELF, "unscale", component=COMPONENT, law=NON_FINITE)
def gradients_left_scaled_on_overflow(call: UnscaleCall) -> None:
    """A tensor that is not finite is not written."""
    keep = [g for g in call.grads if not nonfinite(g)]
    overflow = len(keep) != len(call.grads)
    unscale(replace(call, grads=keep))
    if overflow:
        call.found_inf.fill_(1.0)


@wrong(SHELF, "unscale", component=COMPONENT, law=NON_FINITE)
def non_finite_gradients_zeroed(call: UnscaleCall) -> None:
    """Non-finite gradients become zero on the way out."""
    unscale(call)
    for g in call.grads:
        g.masked_fill_(~torch.isfinite(g), 0.0)


@wrong(SHELF, "unscale", "D10", component="unscale")
def unscaled_twice(call: UnscaleCall) -> None:
    """The gradients are multiplied by inv_scale two times."""
    unscale(call)
    unscale(call)


@wrong(SHELF, "unscale", component="unscale")
def divided_by_inv_scale(call: UnscaleCall) -> None:
    """The gradients are divided by inv_scale."""
    unscale(replace(call, inv_scale=1.0 / call.inv_scale))


@wrong(SHELF, "unscale", "A22", component="precision")
def inv_scale_in_the_gradient_dtype(call: UnscaleCall) -> None:
    """inv_scale is rounded to the dtype of the gradient first."""
    unscale(replace(call, inv_scale=fp32(call.inv_scale.to(torch.bfloat16))))


@wrong(SHELF, "unscale", component="sizes", law="boundary_sizes")
def unscale_tail_skipped(call: UnscaleCall) -> None:
    """The last n mod 4 elements stay scaled."""
    unscale(replace(call, grads=[g.view(-1)[: g.numel() // 4 * 4] for g in call.grads]))
    for g in call.grads:
        if nonfinite(g):
            call.found_inf.fill_(1.0)
