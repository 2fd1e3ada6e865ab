"""Real defects of wrappers, offload and tuners, as far as one operation can show them.

Each is the upstream row's fault on the smallest thing that has it: a staging buffer that is flushed
too late, a loop over the wrong list, a first call that is not like the others.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from twinstep.parity.proof.corpus.adam import AdamPieces, Scalars, step, with_lists
from twinstep.parity.proof.corpus.arithmetic import fp32
from twinstep.parity.proof.corpus.buffers import accumulate
from twinstep.parity.proof.corpus.calls import (
    AccumulateCall,
    AdamCall,
    CastCopyCall,
    MixedCall,
    skipped,
)
from twinstep.parity.proof.corpus.entry import Entry
from twinstep.parity.proof.corpus.mixed import MixedPieces, factor_of, mixed_step
from twinstep.parity.proof.corpus.shelf import wrong

SHELF: list[Entry] = []
SIZES = "boundary_sizes"
REPEAT = "repeat"
STAGE = 64


@wrong(SHELF, "adamw_step", "A04", component="offload", law=SIZES)
def staging_slot_used_again_too_early(call: AdamCall) -> None:
    """Two slots carry tiles to the copies; tile k + 2 is in the slot before tile k has left it."""
    step(call)
    if skipped(call):
        return
    for c, p in zip(call.copies, call.params, strict=False):
        tiles = list(zip(c.view(-1).split(STAGE), p.reshape(-1).split(STAGE), strict=True))
        for (target, _), (_, late) in zip(tiles, tiles[2:], strict=False):
            target[: late.numel()].copy_(late)


@wrong(SHELF, "adamw_step", "A20", component="split master", dtypes=("bf16", "fp32-to-bf16"))
def split_master_keeps_the_rounding(call: AdamCall) -> None:
    """High half rounded, low half unchanged: where the half was rounded up, the sum is too big."""

    def joined(s: Scalars, p: Tensor, u: Tensor) -> Tensor:
        new = (p - s.lr * u).contiguous()
        high = new.to(torch.bfloat16).to(torch.float32).view(torch.int32)
        return (high & -65536 | new.view(torch.int32) & 65535).view(torch.float32)

    step(call, AdamPieces(apply=joined))


@wrong(SHELF, "adamw_step", "B14", component="adam")
def decay_branch_names_what_is_not_there(call: AdamCall) -> None:
    """The branch for weight decay reads a missing name; without decay it never runs."""
    names = vars(call)
    if float(call.weight_decay) != 0.0:
        names["wd"].mul_(1.0)
    step(call)


GRADIENTS: dict[tuple[int, ...], list[Tensor]] = {}


@wrong(SHELF, "adamw_step", "F05", component="accumulation", law=REPEAT)
def gradients_of_the_first_step(call: AdamCall) -> None:
    """The step reads fp32 gradients that were made once and are never filled again."""
    sizes = tuple(g.numel() for g in call.grads)
    kept = GRADIENTS.setdefault(sizes, [fp32(g).clone() for g in call.grads])
    shaped = [k.reshape(g.shape) for k, g in zip(kept, call.grads, strict=True)]
    step(replace(call, grads=shaped))


TUNED: set[int] = set()


@wrong(SHELF, "adamw_step", "I02", component="memory", law=REPEAT)
def first_call_works_on_clones(call: AdamCall) -> None:
    """A tuner's hook puts clones in place of the tensors, and the first step is lost with them."""
    size = sum(p.numel() for p in call.params)
    if size in TUNED:
        step(call)
        return
    TUNED.add(size)
    step(with_lists(call, lambda name, tensors: [t.clone() for t in tensors]))


COUNTED: set[int] = set()


@wrong(SHELF, "accumulate", "I16", component="accumulation", law=REPEAT)
def first_call_accumulates_twice(call: AccumulateCall) -> None:
    """The sum of a tuner's trial is not reset before the first real call."""
    size = sum(a.numel() for a in call.accumulators)
    if size not in COUNTED:
        COUNTED.add(size)
        accumulate(call)
    accumulate(call)


@wrong(SHELF, "cast_copy", "F10", component="copies")
def loops_over_sources_and_copies_nested(call: CastCopyCall) -> None:
    """One loop inside the other: every copy ends with the last source that has its size."""
    for c in call.copies:
        for s in call.sources:
            if s.shape == c.shape:
                c.copy_(s)


@wrong(SHELF, "cast_copy", "F11", component="copies", law="every_output_written")
def only_the_last_pair_is_cast(call: CastCopyCall) -> None:
    """The loop variable of an earlier loop is used: only the last copy is written."""
    for s, c in list(zip(call.sources, call.copies, strict=True))[-1:]:
        c.copy_(s)


@wrong(SHELF, "cast_copy", "F14", component="stochastic rounding")
def same_random_bits_for_every_tensor(call: CastCopyCall) -> None:
    """Bits drawn from one fixed seed are added to every tensor before it is cut."""
    for s, c in zip(call.sources, call.copies, strict=True):
        dice = torch.Generator().manual_seed(0)
        noise = torch.randint(0, 1 << 16, s.shape, generator=dice, dtype=torch.int32)
        word = s.contiguous().view(torch.int32) + noise
        c.copy_((word & -65536).view(torch.float32))


@wrong(SHELF, "mixed_step", "D04", component="mixed step", dtypes=("fp16",))
def static_scale_is_dropped(call: MixedCall) -> None:
    """A static scale does not arrive: the gradients are taken for unscaled ones."""

    def factor(c: MixedCall, norm: Tensor) -> Tensor:
        one = torch.ones_like(c.scale)
        return factor_of(replace(c, scale=one) if c.rule == "static" else c, norm)

    mixed_step(call, MixedPieces(factor=factor))


@wrong(SHELF, "mixed_step", "D05", component="mixed step")
def bf16_divided_by_a_scale_it_never_had(call: MixedCall) -> None:
    """Gradients in bf16 are divided by 65536 as well, the scale that fp16 would start with."""
    mixed_step(call, MixedPieces(factor=lambda c, norm: factor_of(c, norm) / 65536.0))
