"""Adam and AdamW kernels whose formulas are right and whose bookkeeping is not.

Skipped steps, step counters, outputs left out, memory that is not theirs, sizes and tails, memory
of their own between two calls.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from twinstep.parity.proof.corpus.adam import (
    AdamPieces,
    Scalars,
    next_count,
    step,
    update,
    windowed,
    with_lists,
)
from twinstep.parity.proof.corpus.calls import AdamCall, skipped
from twinstep.parity.proof.corpus.entry import Entry
from twinstep.parity.proof.corpus.shelf import wrong

SHELF: list[Entry] = []
SKIP = "skipped_step"
WRITTEN = "every_output_written"
ELSE = "nothing_else_written"
SIZES = "boundary_sizes"
REPEAT = "repeat"
COPIES: list[Any] = []


def clean(call: AdamCall) -> AdamCall:
    """The call as if no gradient had overflowed."""
    return replace(call, found_inf=torch.zeros_like(call.found_inf))


@wrong(SHELF, "adamw_step", "A29", "C22", component="overflow", law=SKIP)
def overflow_ignored(call: AdamCall) -> None:
    """found_inf is not read: the step is taken."""
    step(clean(call))


@wrong(SHELF, "adamw_step", "A23", component="overflow", law=SKIP)
def step_counted_on_a_skipped_step(call: AdamCall) -> None:
    """Weights and moments are left alone, but the counters go on."""
    if skipped(call):
        for t in call.steps:
            t.add_(1)
    step(call)


@wrong(SHELF, "adamw_step", component="overflow", law=SKIP)
def moments_decay_on_a_skipped_step(call: AdamCall) -> None:
    """A skipped step still multiplies the moments by their betas."""
    if skipped(call):
        for m, v in zip(call.exp_avgs, call.exp_avg_sqs, strict=True):
            m.mul_(call.beta1)
            v.mul_(call.beta2)
    step(call)


@wrong(SHELF, "adamw_step", component="overflow", law=SKIP)
def weight_decay_on_a_skipped_step(call: AdamCall) -> None:
    """A skipped step still decays the weights."""
    if skipped(call):
        for p in call.params:
            p.sub_(call.lr * call.weight_decay * p)
    step(call)


@wrong(SHELF, "adamw_step", "C16", component="overflow", law=SKIP)
def copies_hold_gradients_after_a_skipped_step(call: AdamCall) -> None:
    """The copies served as scratch for the gradients and are not restored on a skip."""
    for c, g in zip(call.copies, call.grads, strict=False):
        c.copy_(g)
    step(call)


@wrong(SHELF, "adamw_step", component="overflow", law=SKIP)
def copies_refreshed_on_a_skipped_step(call: AdamCall) -> None:
    """A skipped step writes the copies anew from the master weights."""
    step(call)
    for c, p in zip(call.copies, call.params, strict=False):
        c.copy_(p)


@wrong(SHELF, "adamw_step", component="overflow")
def skips_only_without_overflow(call: AdamCall) -> None:
    """The test of found_inf is the wrong way round."""
    step(replace(call, found_inf=1.0 - call.found_inf))


@wrong(SHELF, "adamw_step", component="adam")
def no_op(call: AdamCall) -> None:
    """Nothing happens at all."""


@wrong(SHELF, "adamw_step", component="adam")
def counts_but_does_nothing(call: AdamCall) -> None:
    """The counters advance and no weight moves."""
    if not skipped(call):
        for t in call.steps:
            t.add_(1)


@wrong(SHELF, "adamw_step", component="copies", law=WRITTEN)
def copies_forgotten(call: AdamCall) -> None:
    """The low-precision copies are never written."""
    step(replace(call, copies=[]))


@wrong(SHELF, "adamw_step", "C20", component="copies", law=WRITTEN)
def copies_written_only_on_overflow(call: AdamCall) -> None:
    """`if found_inf:` stands where `if found_inf is not None:` was meant."""
    step(call if skipped(call) else replace(call, copies=[]))


@wrong(SHELF, "adamw_step", component="copies")
def copies_of_the_weights_before(call: AdamCall) -> None:
    """The copies are taken before the update."""
    before = [p.clone() for p in call.params]
    step(call)
    if not skipped(call):
        for c, p in zip(call.copies, before, strict=False):
            c.copy_(p)


@wrong(SHELF, "adamw_step", component="counters")
def steps_forgotten(call: AdamCall) -> None:
    """The step counters stay where they are."""
    step(replace(call, steps=[t.clone() for t in call.steps]))


@wrong(SHELF, "adamw_step", component="counters")
def steps_counted_twice(call: AdamCall) -> None:
    """Every step adds two to the counters."""
    step(call)
    if not skipped(call):
        for t in call.steps:
            t.add_(1)


@wrong(SHELF, "adamw_step", component="counters")
def steps_counted_in_float64(call: AdamCall) -> None:
    """Counters pass through a float64, which holds no odd number past 2^53."""
    step(call)
    for t in call.steps:
        t.copy_(t.double())


@wrong(SHELF, "adamw_step", "A08", component="counters", dtypes=("mixed",))
def last_counter_serves_all(call: AdamCall) -> None:
    """The bias correction of every tensor uses the count of the last one."""
    last = next_count(call, len(call.steps) - 1) if call.steps else 0
    step(call, AdamPieces(count=lambda c, i: last))


@wrong(SHELF, "adamw_step", "A08", component="counters", dtypes=("mixed",))
def first_counter_alone_advances(call: AdamCall) -> None:
    """Only the first tensor's counter is written."""
    step(replace(call, steps=call.steps[:1] + [t.clone() for t in call.steps[1:]]))


@wrong(SHELF, "adamw_step", "A07", component="counters", dtypes=("mixed",))
def counter_advanced_once_per_dtype(call: AdamCall) -> None:
    """The launch of each dtype in a mixed list advances the count that the next one reads."""
    order: list[torch.dtype] = []
    for p in call.params:
        if p.dtype not in order:
            order.append(p.dtype)

    def count(c: AdamCall, i: int) -> int:
        return next_count(c, i) + order.index(c.params[i].dtype)

    step(call, AdamPieces(count=count))


@wrong(SHELF, "adamw_step", "A25", component="counters", law=SIZES)
def counter_of_an_empty_tensor_stays(call: AdamCall) -> None:
    """A tensor without elements is passed over, its counter too."""
    kept = [p.numel() > 0 for p in call.params]

    def some(name: str, tensors: list[Tensor]) -> list[Tensor]:
        return [t for t, keep in zip(tensors, kept, strict=False) if keep]

    step(with_lists(call, some))


@wrong(SHELF, "adamw_step", "I13", component="memory", law=ELSE)
def gradient_unscaled_in_place(call: AdamCall) -> None:
    """The unscaled gradient is left in the caller's tensor."""
    step(call)
    if not skipped(call):
        for g in call.grads:
            g.mul_(call.factor)


@wrong(SHELF, "adamw_step", "A44", component="memory", law=ELSE)
def gradient_tail_overwritten(call: AdamCall) -> None:
    """The scalar tail leaves the new weights in the last elements of the gradient."""
    step(call)
    for g, p in zip(call.grads, call.params, strict=True):
        body = g.numel() - g.numel() % 8
        g.view(-1)[body:] = p.view(-1)[body:].to(g.dtype)


@wrong(SHELF, "adamw_step", "F17", component="memory", law=ELSE)
def gradients_zeroed(call: AdamCall) -> None:
    """The gradients are zeroed after use, although the caller still owns them."""
    step(call)
    for g in call.grads:
        g.zero_()


@wrong(SHELF, "adamw_step", component="memory", law=ELSE)
def learning_rate_scaled_in_place(call: AdamCall) -> None:
    """The bias-corrected learning rate is written back into the caller's lr."""
    step(call)
    call.lr.mul_(0.5)


@wrong(SHELF, "adamw_step", "I04", component="memory", law=ELSE)
def one_word_past_the_end(call: AdamCall) -> None:
    """The word past the last master weight is set to zero."""
    step(call)
    for p in call.params:
        end = p.storage_offset() + p.numel()
        if p.numel() and (end + 1) * p.element_size() <= p.untyped_storage().nbytes():
            p.as_strided((1,), (1,), end).zero_()


@wrong(SHELF, "adamw_step", component="memory", law=ELSE)
def one_word_before_the_start(call: AdamCall) -> None:
    """The word in front of the first moment is overwritten."""
    step(call)
    for m in call.exp_avgs:
        if m.numel() and m.storage_offset() > 0:
            m.as_strided((1,), (1,), m.storage_offset() - 1).fill_(1.0)


@wrong(SHELF, "adamw_step", "A01", component="sizes", law=SIZES)
def tail_squares_the_moment(call: AdamCall) -> None:
    """The last n mod 8 elements compute m * (m * b1) in place of b1 * m."""

    def first(s: Scalars, m: Tensor, g: Tensor) -> Tensor:
        kept = s.b1 * m
        body = m.numel() - m.numel() % 8
        kept.view(-1)[body:] *= m.view(-1)[body:]
        return kept + s.c1 * g

    step(call, AdamPieces(first=first))


@wrong(SHELF, "adamw_step", component="sizes", law=SIZES)
def last_element_skipped(call: AdamCall) -> None:
    """The loop ends at n - 1."""
    step(windowed(call, lambda t: slice(0, max(t.numel() - 1, 0))))


@wrong(SHELF, "adamw_step", component="sizes", law=SIZES)
def tail_of_the_vector_skipped(call: AdamCall) -> None:
    """Only whole groups of four elements are updated."""
    step(windowed(call, lambda t: slice(0, t.numel() // 4 * 4)))


@wrong(SHELF, "adamw_step", component="sizes", law=SIZES)
def first_block_only(call: AdamCall) -> None:
    """The grid has one block: elements from 1024 on are left."""
    step(windowed(call, lambda t: slice(0, 1024)))


@wrong(SHELF, "adamw_step", "A02", component="sizes", law=SIZES)
def first_dimension_for_the_count(call: AdamCall) -> None:
    """`p.shape[0]` elements are updated, not `p.numel()`."""
    rows = [p.shape[0] if p.dim() else 1 for p in call.params]

    def part(name: str, tensors: list[Tensor]) -> list[Tensor]:
        if name == "steps":
            return tensors
        return [t.view(-1)[:n] for t, n in zip(tensors, rows, strict=False)]

    step(with_lists(call, part))


@wrong(SHELF, "adamw_step", "A17", component="sizes", law=SIZES)
def trailing_empty_tensor_drops_the_launch(call: AdamCall) -> None:
    """The queue is flushed by the last tensor's last chunk, which an empty tensor does not have."""
    if call.params and call.params[-1].numel() == 0:
        return
    step(call)


@wrong(SHELF, "adamw_step", "A26", component="sizes", law=SIZES)
def empty_list_raises(call: AdamCall) -> None:
    """The device is read from the first parameter before anyone asks whether there is one."""
    with torch.device(call.params[0].device):
        step(call)


@wrong(SHELF, "adamw_step", component="sizes", law=SIZES)
def first_tensor_only(call: AdamCall) -> None:
    """A list is taken for a flat buffer: its first tensor is updated, the others are not."""
    step(with_lists(call, lambda name, tensors: tensors[:1]))


@wrong(SHELF, "adamw_step", component="sizes", law=SIZES)
def tensors_of_one_element_skipped(call: AdamCall) -> None:
    """Tensors with a single element are taken for scalars and left alone."""
    for i, p in enumerate(call.params):
        if p.numel() != 1 and not skipped(call):
            update(call, i, AdamPieces())


@wrong(SHELF, "adamw_step", component="sizes", law=SIZES)
def gradients_taken_in_reverse(call: AdamCall) -> None:
    """Gradients of equal size are paired with the parameters from the end of the list."""
    by_size: dict[int, list[Tensor]] = {}
    for g in call.grads:
        by_size.setdefault(g.numel(), []).append(g)
    step(replace(call, grads=[by_size[p.numel()].pop().view(p.shape) for p in call.params]))


POWERS: dict[float, float] = {}


@wrong(SHELF, "adamw_step", "A05", component="counters", law=REPEAT)
def bias_powers_kept_between_calls(call: AdamCall) -> None:
    """beta**t lives in the module and is multiplied once per call, whoever calls."""

    def formed(c: AdamCall, t: int) -> Scalars:
        s = AdamPieces().scalars(c, 1)
        for beta in (float(c.beta1), float(c.beta2)):
            POWERS[beta] = POWERS.get(beta, 1.0) * beta
        if not c.bias_correction:
            return s
        k1, k2 = (torch.tensor(1.0 - POWERS[float(b)]) for b in (c.beta1, c.beta2))
        return replace(s, k1=k1, k2=k2)

    step(call, AdamPieces(scalars=formed))


CACHED: dict[int, Scalars] = {}


@wrong(SHELF, "adamw_step", "E17", "I11", component="counters", law=REPEAT)
def constants_cached_by_list_length(call: AdamCall) -> None:
    """The constants of the first call serve every later list of equal length."""

    def formed(c: AdamCall, t: int) -> Scalars:
        return CACHED.setdefault(len(c.params), AdamPieces().scalars(c, t))

    step(call, AdamPieces(scalars=formed))


SEEN: set[int] = set()


@wrong(SHELF, "adamw_step", "I01", component="memory", law=REPEAT)
def first_call_applies_the_step_twice(call: AdamCall) -> None:
    """A warm-up launch on the live tensors takes the step once more, once for every new size."""
    sizes = sum(p.numel() for p in call.params)
    if sizes not in SEEN:
        SEEN.add(sizes)
        step(replace(call, steps=[t.clone() for t in call.steps]))
    step(call)


GENERATOR = torch.Generator()


@wrong(SHELF, "adamw_step", component="precision", law=REPEAT)
def random_last_bit(call: AdamCall) -> None:
    """The last bit of the new weight is drawn at random."""

    def apply(s: Scalars, p: Tensor, u: Tensor) -> Tensor:
        new = p - s.lr * u
        noise = torch.randint(0, 2, new.shape, generator=GENERATOR, dtype=torch.int32)
        return (new.contiguous().view(torch.int32) ^ noise).view(torch.float32)

    step(call, AdamPieces(apply=apply))


@wrong(SHELF, "adamw_step", component="caches", law=REPEAT, dtypes=("fp16", "bf16"))
def copies_found_by_all_other_addresses(call: AdamCall) -> None:
    """Copies are written where they lay in the last call, if no other list has moved."""
    lists = (call.params, call.grads, call.exp_avgs, call.exp_avg_sqs)
    shapes = [tensor.shape for tensor in call.copies]
    key = shapes, [tensor.data_ptr() for own in lists for tensor in own]
    if COPIES[:1] != [key]:
        COPIES[:] = [key, call.copies]
    step(replace(call, copies=COPIES[1]))
