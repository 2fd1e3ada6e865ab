"""Adam and AdamW kernels that compute or store in the wrong precision."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from twinstep.parity.proof.corpus.adam import AdamPieces, Scalars, scalars, step, update
from twinstep.parity.proof.corpus.arithmetic import fp32
from twinstep.parity.proof.corpus.calls import AdamCall, skipped
from twinstep.parity.proof.corpus.entry import Entry
from twinstep.parity.proof.corpus.shelf import wrong

SHELF: list[Entry] = []
COMPONENT = "precision"


def through(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value rounded to dtype, back in fp32."""
    return fp32(value.to(dtype))


@wrong(SHELF, "adamw_step", "A19", component=COMPONENT)
def moments_rounded_to_fp16(call: AdamCall) -> None:
    """Both moments pass through fp16 on their way to fp32 storage."""
    step(call, AdamPieces(moment=lambda x: through(x, torch.float16)))


@wrong(SHELF, "adamw_step", "A19", component=COMPONENT, dtypes=("bf16-pure",))
def moments_stored_through_the_parameter_dtype(call: AdamCall) -> None:
    """`m.to(p.dtype)` at the store, although the moments are kept in fp32."""
    if not skipped(call):
        for i, p in enumerate(call.params):
            update(call, i, AdamPieces(moment=partial(through, dtype=p.dtype)))


@wrong(SHELF, "adamw_step", "A47", component=COMPONENT)
def gradient_squared_in_fp16(call: AdamCall) -> None:
    """The square of g is formed in fp16: it overflows at 256 and vanishes below 2**-12."""

    def second(s: Scalars, v: Tensor, g: Tensor) -> Tensor:
        half = g.to(torch.float16)
        return s.b2 * v + s.c2 * fp32(half * half)

    step(call, AdamPieces(second=second))


@wrong(SHELF, "adamw_step", "A22", component=COMPONENT)
def gradient_unscaled_in_its_own_dtype(call: AdamCall) -> None:
    """The factor is applied before the gradient goes to fp32."""
    step(call, AdamPieces(gradient=lambda g, factor: fp32(g * factor.to(g.dtype))))


@wrong(SHELF, "adamw_step", "F02", "F16", component=COMPONENT, dtypes=("bf16-pure",))
def decay_rounded_before_the_update(call: AdamCall) -> None:
    """P is decayed in bf16 first, where half an ulp swallows the decay, then updated."""

    def apply(s: Scalars, p: Tensor, u: Tensor) -> Tensor:
        return through(p * (1.0 - s.lr * s.wd), torch.bfloat16) - s.lr * u

    step(call, AdamPieces(decay=lambda s, u, p: u, apply=apply))


@wrong(SHELF, "adamw_step", "A22", component=COMPONENT, dtypes=("fp16-pure",))
def update_computed_in_fp16(call: AdamCall) -> None:
    """Product and subtraction are rounded to fp16 one by one."""

    def apply(s: Scalars, p: Tensor, u: Tensor) -> Tensor:
        return through(p - through(s.lr * u, torch.float16), torch.float16)

    step(call, AdamPieces(apply=apply))


@wrong(SHELF, "adamw_step", "F01", component=COMPONENT)
def master_weights_in_bf16(call: AdamCall) -> None:
    """The fp32 master weight is rounded to bf16 after every step: small updates are lost."""
    step(call, AdamPieces(apply=lambda s, p, u: through(p - s.lr * u, torch.bfloat16)))


@wrong(SHELF, "adamw_step", component="copies")
def copies_truncated(call: AdamCall) -> None:
    """The bf16 copy is the upper half of the fp32 word: always rounded towards zero."""

    def cut(p: Tensor) -> Tensor:
        return (p.view(torch.int32) & -65536).view(torch.float32)

    step(call, AdamPieces(copy=cut))


@wrong(SHELF, "adamw_step", component="copies")
def copies_rounded_twice(call: AdamCall) -> None:
    """The bf16 copy is made from an fp16 one: range and last bit are wrong."""
    step(call, AdamPieces(copy=lambda p: through(p, torch.float16)))


@wrong(SHELF, "adamw_step", component=COMPONENT)
def moments_rounded_to_bf16_before_use(call: AdamCall) -> None:
    """The stored moments are read as bf16."""
    step(
        call,
        AdamPieces(
            first=lambda s, m, g: s.b1 * through(m, torch.bfloat16) + s.c1 * g,
            second=lambda s, v, g: s.b2 * through(v, torch.bfloat16) + (s.c2 * g) * g,
        ),
    )


@wrong(SHELF, "adamw_step", component=COMPONENT)
def constants_in_fp16(call: AdamCall) -> None:
    """Eps and weight decay pass through fp16, where 1e-8 is zero."""

    def formed(c: AdamCall, t: int) -> Scalars:
        s = scalars(c, t)
        return replace(s, eps=through(s.eps, torch.float16), wd=through(s.wd, torch.float16))

    step(call, AdamPieces(scalars=formed))
