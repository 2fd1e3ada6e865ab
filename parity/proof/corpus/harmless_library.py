"""Optimizers of torch itself, wrapped as kernels.

They know no factor and no copies, keep their step counters in fp32, and cannot switch the bias
correction off. So the wrapper unscales into new fp32 gradients, casts the copies afterwards, and
for a step without bias correction hands in a count so high that beta**t is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from twinstep.parity.proof.corpus.arithmetic import fp32
from twinstep.parity.proof.corpus.calls import AdamCall, skipped
from twinstep.parity.proof.corpus.entry import Variant
from twinstep.parity.proof.corpus.shelf import harmless

SHELF: list[Variant] = []
MASTERS = ("bf16", "fp32")
LATE = 2.0**40


def counters(call: AdamCall) -> list[Tensor]:
    """The step counters as torch keeps them: fp32."""
    if call.bias_correction:
        return [fp32(t) for t in call.steps]
    return [torch.tensor(LATE) for _ in call.steps]


def with_torch(call: AdamCall, *, decoupled: bool, fused: bool, foreach: bool) -> None:
    """One step of torch.optim.AdamW or Adam over the caller's memory."""
    if skipped(call) or not call.params:
        return
    function = adamw if decoupled else adam
    function(
        call.params,
        [fp32(g) * call.factor for g in call.grads],
        call.exp_avgs,
        call.exp_avg_sqs,
        [],
        counters(call),
        fused=fused,
        foreach=foreach,
        amsgrad=False,
        beta1=float(call.beta1),
        beta2=float(call.beta2),
        lr=float(call.lr),
        weight_decay=float(call.weight_decay),
        eps=float(call.eps),
        maximize=False,
    )
    for c, p in zip(call.copies, call.params, strict=False):
        c.copy_(p)
    for t in call.steps:
        t.add_(1)


@harmless(SHELF, "adamw_step", dtypes=MASTERS)
def torch_adamw(call: AdamCall) -> None:
    """torch.optim.AdamW, one tensor at a time."""
    with_torch(call, decoupled=True, fused=False, foreach=False)


@harmless(SHELF, "adamw_step", dtypes=MASTERS)
def torch_adamw_foreach(call: AdamCall) -> None:
    """torch.optim.AdamW(foreach=True)."""
    with_torch(call, decoupled=True, fused=False, foreach=True)


@harmless(SHELF, "adamw_step", dtypes=MASTERS)
def torch_adamw_fused(call: AdamCall) -> None:
    """torch.optim.AdamW(fused=True)."""
    with_torch(call, decoupled=True, fused=True, foreach=False)


@harmless(SHELF, "adam_step", dtypes=MASTERS)
def torch_adam_fused(call: AdamCall) -> None:
    """torch.optim.Adam(fused=True)."""
    with_torch(call, decoupled=False, fused=True, foreach=False)
