"""Flat buffers, accumulation and casts that are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from twinstep.parity.proof.corpus.arithmetic import fp32
from twinstep.parity.proof.corpus.buffers import (
    accumulate,
    cast_copy,
    flatten,
    lay,
    starts,
    unflatten,
)
from twinstep.parity.proof.corpus.calls import (
    AccumulateCall,
    CastCopyCall,
    FlattenCall,
    Tensors,
    UnflattenCall,
)
from twinstep.parity.proof.corpus.entry import Entry
from twinstep.parity.proof.corpus.shelf import wrong

SHELF: list[Entry] = []
WRITTEN = "every_output_written"
SIZES = "boundary_sizes"
ELSE = "nothing_else_written"
REPEAT = "repeat"
BF16 = torch.bfloat16
PLACES: list[Any] = []
SUMS: list[Any] = []
KEPT: list[tuple[int, ...]] = []
LENGTHS: dict[object, list[int]] = {}


def packed(tensors: Tensors, slot: int) -> list[int]:
    """Places without alignment."""
    return starts(tensors, 1)


def mirrored(tensors: Tensors, slot: int) -> list[int]:
    """Places of the list laid out from its end."""
    return starts(tensors[::-1], slot)[::-1]


@wrong(SHELF, "flatten", "E19", component="flat buffer", law=WRITTEN)
def gaps_not_zeroed(call: FlattenCall) -> None:
    """Alignment gaps and tail keep what was in the buffer."""
    lay(call, starts(call.tensors, call.slot))


@wrong(SHELF, "flatten", "E19", component="flat buffer", law=WRITTEN)
def tail_not_zeroed(call: FlattenCall) -> None:
    """The gaps are zeroed, the room past the last tensor is not."""
    places = starts(call.tensors, call.slot)
    end = places[-1] + call.tensors[-1].numel() if places else 0
    call.flat[0][:end].zero_()
    lay(call, places)


@wrong(SHELF, "flatten", component="flat buffer", law=WRITTEN)
def long_tail_not_zeroed(call: FlattenCall) -> None:
    """One block zeroes what lies past the last tensor: 1,024 elements."""
    places = starts(call.tensors, call.slot)
    end = places[-1] + call.tensors[-1].numel() if places else 0
    call.flat[0][: end + 1024].zero_()
    lay(call, places)


@wrong(SHELF, "flatten", component="flat buffer")
def gaps_filled_with_negative_zero(call: FlattenCall) -> None:
    """The padding is -0.0, where +0.0 is promised."""
    call.flat[0].fill_(-0.0)
    lay(call, starts(call.tensors, call.slot))


@wrong(SHELF, "flatten", component="flat buffer")
def slots_ignored(call: FlattenCall) -> None:
    """The tensors stand end to end, without alignment."""
    flatten(call, packed)


@wrong(SHELF, "flatten", component="flat buffer")
def order_reversed(call: FlattenCall) -> None:
    """The last tensor comes first."""
    flatten(call, mirrored)


@wrong(SHELF, "flatten", component="flat buffer", law=SIZES)
def empty_tensor_takes_a_slot(call: FlattenCall) -> None:
    """A tensor without elements takes a whole slot, where there is room for it."""

    def places(tensors: Tensors, slot: int) -> list[int]:
        shifted = starts([t if t.numel() else torch.zeros(1) for t in tensors], slot)
        end = max((s + t.numel() for s, t in zip(shifted, tensors, strict=True)), default=0)
        return shifted if end <= call.flat[0].numel() else starts(tensors, slot)

    flatten(call, places)


@wrong(SHELF, "flatten", component="flat buffer", law=SIZES)
def last_tensor_not_laid(call: FlattenCall) -> None:
    """The loop over the tensors ends one early."""
    flatten(replace(call, tensors=call.tensors[:-1]))


@wrong(SHELF, "flatten", component="memory", law=ELSE)
def sources_zeroed(call: FlattenCall) -> None:
    """The tensors are zeroed once they are in the buffer."""
    flatten(call)
    for t in call.tensors:
        t.zero_()


@wrong(SHELF, "unflatten", component="flat buffer")
def read_without_slots(call: UnflattenCall) -> None:
    """The tensors are read end to end, without alignment."""
    unflatten(call, packed)


@wrong(SHELF, "unflatten", component="flat buffer")
def read_in_reverse(call: UnflattenCall) -> None:
    """The last tensor is read from the front."""
    unflatten(call, mirrored)


@wrong(SHELF, "unflatten", component="flat buffer", law=SIZES)
def last_tensor_not_read(call: UnflattenCall) -> None:
    """The loop over the tensors ends one early."""
    unflatten(replace(call, tensors=call.tensors[:-1]))


@wrong(SHELF, "unflatten", "F17", component="memory", law=ELSE)
def buffer_zeroed_after_reading(call: UnflattenCall) -> None:
    """The buffer is cleared for the next step, although it is only read."""
    unflatten(call)
    call.flat[0].zero_()


@wrong(SHELF, "accumulate", "F07", component="accumulation", dtypes=("bf16",))
def accumulated_in_bf16(call: AccumulateCall) -> None:
    """The fp32 accumulator is rounded to bf16 with every gradient."""
    accumulate(call, lambda a, g: fp32((fp32(a) + fp32(g)).to(BF16)))


@wrong(SHELF, "accumulate", "F16", component="accumulation", dtypes=("bf16",))
def accumulator_read_as_bf16(call: AccumulateCall) -> None:
    """The accumulator is rounded to the dtype of the gradient before the sum."""
    accumulate(call, lambda a, g: fp32(a.to(g.dtype)) + fp32(g))


@wrong(SHELF, "accumulate", component="accumulation")
def accumulator_overwritten(call: AccumulateCall) -> None:
    """The gradient replaces what was accumulated."""
    accumulate(call, lambda a, g: fp32(g))


@wrong(SHELF, "accumulate", component="accumulation")
def accumulator_doubled(call: AccumulateCall) -> None:
    """The gradient is added two times."""
    accumulate(call)
    accumulate(call)


@wrong(SHELF, "accumulate", component="accumulation")
def accumulator_averaged(call: AccumulateCall) -> None:
    """Accumulator and gradient are averaged."""
    accumulate(call, lambda a, g: (fp32(a) + fp32(g)) * 0.5)


@wrong(SHELF, "accumulate", component="sizes", law=SIZES)
def accumulate_tail_skipped(call: AccumulateCall) -> None:
    """The last n mod 8 elements are left out."""

    def body(tensors: Tensors) -> Tensors:
        return [t.view(-1)[: t.numel() // 8 * 8] for t in tensors]

    accumulate(AccumulateCall(body(call.accumulators), body(call.grads)))


@wrong(SHELF, "accumulate", component="memory", law=ELSE)
def accumulate_clears_the_gradient(call: AccumulateCall) -> None:
    """The gradient is zeroed after it was added."""
    accumulate(call)
    for g in call.grads:
        g.zero_()


@wrong(SHELF, "accumulate", component="accumulation", law="non_finite", dtypes=("fp32",))
def accumulate_drops_non_finite(call: AccumulateCall) -> None:
    """A gradient that is not finite counts as zero."""
    accumulate(call, lambda a, g: fp32(a) + torch.nan_to_num(fp32(g), 0.0, 0.0, 0.0))


@wrong(SHELF, "accumulate", component="caches", law=REPEAT)
def lengths_kept_by_addresses(call: AccumulateCall) -> None:
    """The lengths of the last call are taken again where the addresses are the same."""
    addresses = tuple(t.data_ptr() for t in (*call.accumulators, *call.grads))
    if KEPT[:1] != [addresses]:
        KEPT[:] = [addresses, tuple(t.numel() for t in call.grads)]
    accumulate_heads(call, KEPT[1])


def accumulate_heads(call: AccumulateCall, lengths: Sequence[int]) -> None:
    """Accumulate that many elements of each tensor, or all that it has."""

    def head(tensors: Tensors) -> Tensors:
        return [t.view(-1)[:n] for t, n in zip(tensors, lengths, strict=True)]

    accumulate(AccumulateCall(head(call.accumulators), head(call.grads)))


@wrong(SHELF, "accumulate", component="caches", law=REPEAT)
def lengths_kept_by_the_first_eight(call: AccumulateCall) -> None:
    """The lengths of an earlier list serve another one of the same number, sum and beginning."""
    lengths = [t.numel() for t in call.grads]
    key = len(lengths), sum(lengths), tuple(lengths[:8])
    accumulate_heads(call, LENGTHS.setdefault(key, lengths))


@wrong(SHELF, "accumulate", component="caches", law=REPEAT)
def places_kept_by_the_ends_of_a_list(call: AccumulateCall) -> None:
    """Gradients are looked for where they lay in the last call, if the first and the last do."""
    pairs = zip(call.accumulators, call.grads, strict=True)
    live = [(a, g) for a, g in pairs if g.numel()]
    grads: list[Tensor] = [g for _, g in live]
    first = grads[0]
    key = len(grads), first.data_ptr(), grads[-1].data_ptr(), sum(g.numel() for g in grads)
    if PLACES[:1] != [key]:
        PLACES[:] = [key, tuple(g.data_ptr() - first.data_ptr() for g in grads)]

    def there(g: Tensor, place: int) -> Tensor:
        offset = first.storage_offset() + place // g.element_size()
        return first.as_strided(g.shape, g.stride(), offset)

    found = [there(g, place) for g, place in zip(grads, PLACES[1], strict=True)]
    accumulate(AccumulateCall([a for a, _ in live], found))


@wrong(SHELF, "accumulate", component="caches", law=REPEAT)
def gradients_found_by_the_sum_of_addresses(call: AccumulateCall) -> None:
    """The gradients of an earlier call serve all of their shapes if the sum of addresses is one."""
    lists = (call.accumulators, call.grads)
    sums = [sum(tensor.data_ptr() for tensor in own) for own in lists]
    key = sums, [grad.shape for grad in call.grads]
    if SUMS[:1] != [key]:
        SUMS[:] = [key, call.grads]
    accumulate(replace(call, grads=SUMS[1]))


def bits(source: Tensor) -> Tensor:
    """The fp32 words as integers."""
    return source.contiguous().view(torch.int32)


def in_one_piece(tensors: Tensors) -> Tensor | None:
    """The memory of tensors that lie side by side, in any order; None if they do not."""
    order = sorted((t for t in tensors if t.numel()), key=lambda t: t.data_ptr())
    kinds = {t.dtype for t in order}
    ends = [t.data_ptr() + t.nbytes for t in order[:-1]]
    if len(kinds) != 1 or ends != [t.data_ptr() for t in order[1:]]:
        return None
    return order[0].as_strided((sum(t.numel() for t in order),), (1,))


@wrong(SHELF, "cast_copy", component="copies", law="alignment")
def neighbours_cast_as_one(call: CastCopyCall) -> None:
    """Sources in one piece of memory are cast as one tensor, as if the copies lay alike."""
    source, copy = in_one_piece(call.sources), in_one_piece(call.copies)
    if source is None or copy is None:
        cast_copy(call)
    else:
        copy.copy_(source)


@wrong(SHELF, "cast_copy", component="copies")
def cast_truncates(call: CastCopyCall) -> None:
    """The upper half of the fp32 word: rounded towards zero, always."""
    cast_copy(call, lambda s: (bits(s) & -65536).view(torch.float32))


@wrong(SHELF, "cast_copy", "F13", component="copies")
def cast_ties_away(call: CastCopyCall) -> None:
    """Half is added and the rest cut off: ties go away from zero."""

    def prepared(s: Tensor) -> Tensor:
        rounded = ((bits(s) + 0x8000) & -65536).view(torch.float32)
        return torch.where(torch.isfinite(s), rounded, s)

    cast_copy(call, prepared)


@wrong(SHELF, "cast_copy", "F13", component="copies")
def cast_adds_noise_and_rounds(call: CastCopyCall) -> None:
    """Stochastic rounding that also rounds to nearest: biased upwards, and not asked for."""

    def prepared(s: Tensor) -> Tensor:
        noise = torch.randint(0, 1 << 16, s.shape, dtype=torch.int32)
        return torch.where(torch.isfinite(s), (bits(s) + noise).view(torch.float32), s)

    cast_copy(call, prepared)


@wrong(SHELF, "cast_copy", component="copies", dtypes=("fp16",))
def cast_saturates(call: CastCopyCall) -> None:
    """Values beyond fp16 become 65504, where inf is right."""
    cast_copy(call, lambda s: torch.where(torch.isfinite(s), s.clamp(-65504.0, 65504.0), s))


@wrong(SHELF, "cast_copy", component="copies", dtypes=("fp16",))
def cast_flushes_subnormals(call: CastCopyCall) -> None:
    """Values below the smallest normal fp16 become zero."""
    cast_copy(call, lambda s: torch.where(s.abs() < 2.0**-14, s * 0.0, s))


@wrong(SHELF, "cast_copy", component="copies")
def cast_loses_the_sign_of_zero(call: CastCopyCall) -> None:
    """-0.0 becomes +0.0."""
    cast_copy(call, lambda s: s + 0.0)


@wrong(SHELF, "cast_copy", component="copies", law="non_finite")
def cast_turns_nan_to_inf(call: CastCopyCall) -> None:
    """NaN becomes inf: only the exponent survives."""
    cast_copy(
        call, lambda s: torch.nan_to_num(s, nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    )


@wrong(SHELF, "cast_copy", component="copies", dtypes=("bf16",))
def cast_through_fp16(call: CastCopyCall) -> None:
    """The bf16 copy is made from an fp16 one."""
    cast_copy(call, lambda s: fp32(s.to(torch.float16)))


@wrong(SHELF, "cast_copy", component="copies", dtypes=("fp16",))
def subnormal_ties_away_from_zero(call: CastCopyCall) -> None:
    """Halfway between two subnormal numbers of fp16 the one further from zero is taken."""

    def rounded(s: Tensor) -> Tensor:
        away = (s.abs() * 2.0**24 + 0.5).floor() * 2.0**-24
        return torch.where(s.abs() < 2.0**-14, away.copysign(s), s)

    cast_copy(call, rounded)


@wrong(SHELF, "cast_copy", component="copies", law=SIZES)
def cast_copies_rows_only(call: CastCopyCall) -> None:
    """`shape[0]` elements are cast, not `numel()`."""
    for s, c in zip(call.sources, call.copies, strict=True):
        rows = s.shape[0] if s.dim() else 1
        c.view(-1)[:rows].copy_(s.view(-1)[:rows])


@wrong(SHELF, "cast_copy", component="layout", law="strided", claims=("strided",))
def padding_copied_too(call: CastCopyCall) -> None:
    """Matrices stored alike are copied from the first byte to the last, with the room between."""

    def stored(t: Tensor) -> Tensor:
        last = sum((n - 1) * by for n, by in zip(t.shape, t.stride(), strict=True))
        return t.as_strided((last + 1,), (1,)) if t.numel() else t

    for s, c in zip(call.sources, call.copies, strict=True):
        if s.stride() == c.stride():
            stored(c).copy_(stored(s))
        else:
            c.copy_(s)
