"""Kernels that are wrong in an ordinary program that does what others do not.

It trains a layer later, an embedding of which a batch has few rows, or writes numbers into the
tensors that it gives.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from twinstep.parity.proof.corpus.adam import step
from twinstep.parity.proof.corpus.arithmetic import fp32
from twinstep.parity.proof.corpus.buffers import accumulate, cast_copy
from twinstep.parity.proof.corpus.calls import (
    AccumulateCall,
    AdamCall,
    CastCopyCall,
    GlobalNormCall,
    skipped,
)
from twinstep.parity.proof.corpus.entry import Entry
from twinstep.parity.proof.corpus.gradients import exact_norm, global_norm
from twinstep.parity.proof.corpus.shelf import wrong

SHELF: list[Entry] = []
READ = WeakIdKeyDictionary()
CAST = WeakIdKeyDictionary()
adamw = partial(wrong, SHELF, "adamw_step")
value = partial(wrong, SHELF)


@adamw(component="counters", law="boundary_sizes")
def five_counters_stand_for_all(call: AdamCall) -> None:
    """Of a long list five step counters are read; if they agree, so do all."""
    count = len(call.steps)
    places = (0, count // 4, count // 2, 3 * count // 4, count - 1)
    some = {int(call.steps[at]) for at in places} if count > 8 else set()
    before = [int(t) for t in call.steps]
    if len(some) == 1 and not skipped(call):
        for t in call.steps:
            t.fill_(next(iter(some)))
    step(call)
    if not skipped(call):
        for t, was in zip(call.steps, before, strict=True):
            t.fill_(was + 1)


@adamw(component="gradients")
def idle_rows_stay(call: AdamCall) -> None:
    """Rows of wide matrices whose gradient is zero keep weights and moments."""
    lists = (call.params, call.exp_avgs, call.exp_avg_sqs, call.copies)
    before = [[tensor.clone() for tensor in tensors] for tensors in lists]
    step(call)
    for tensors, olds in zip(lists, before, strict=True):
        for tensor, old, grad in zip(tensors, olds, call.grads, strict=bool(tensors)):
            if grad.dim() > 1 and grad.shape[-1] >= 16:
                idle = (grad == 0).all(-1, keepdim=True)
                tensor.copy_(torch.where(idle, old, tensor))


@value("global_norm", component="memory", law="process_state", arithmetic="exact")
def gradients_kept_by_a_cycle(call: GlobalNormCall) -> None:
    """A local function that calls itself holds the gradients until garbage is collected."""

    def norm(grads: list[Tensor], first: int = 0) -> float:
        return norm(grads, first) if first else exact_norm(call.grads)

    global_norm(call, norm)


@adamw(component="caches", law="repeat")
def rates_kept_by_version(call: AdamCall) -> None:
    """The rate is read again where a tensor's version has moved, which `.data` does not."""
    version, kept = READ.get(call.lr, (-1, 0.0))
    if version != call.lr._version:
        kept = float(call.lr)
        READ[call.lr] = (call.lr._version, kept)
    step(replace(call, lr=torch.tensor(kept, dtype=torch.float64)))


@value("cast_copy", component="process", law="process_state", arithmetic="exact")
def long_lists_in_a_random_order(call: CastCopyCall) -> None:
    """More than 128 tensors are cast in an order from the global generator."""
    if len(call.sources) > 128:
        random.shuffle([*range(len(call.sources))])
    cast_copy(call)


@value("accumulate", component="caches", law="repeat", dtypes=("bf16", "fp16"))
def gradients_cast_once(call: AccumulateCall) -> None:
    """The fp32 numbers of a gradient are kept by its tensor, which the next backward writes to."""
    for grad in call.grads:
        if grad not in CAST:
            CAST[grad] = fp32(grad).clone()
    accumulate(replace(call, grads=[CAST[grad] for grad in call.grads]))


@value("cast_copy", component="cast", dtypes=("fp16",), arithmetic="exact")
def infinite_half_a_step_early(call: CastCopyCall) -> None:
    """Above 65519 fp16 is infinite; what lies below 65520 rounds to 65504."""

    def early(source: Tensor) -> Tensor:
        wide = fp32(source)
        return torch.where(
            wide.abs() > 65519.0, torch.copysign(torch.tensor(torch.inf), wide), wide
        )

    cast_copy(call, early)


@value("accumulate", component="memory", law="process_state", arithmetic="exact", alone=True)
def gradients_negated_and_back(call: AccumulateCall) -> None:
    """Gradients change their sign in place, are subtracted, and get it back."""
    for a, g in zip(call.accumulators, call.grads, strict=True):
        a.sub_(g.neg_())
        g.neg_()
