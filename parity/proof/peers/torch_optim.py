"""torch.optim.AdamW, Adam and SGD: the classes themselves, over the caller's memory.

They take no factor and write no copies, so the adapter unscales into new gradients first, as
GradScaler does, and casts the copies afterwards, as a mixed-precision wrapper does. It keeps the
step counters too, but for one subject that shows torch's own, which are fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn import Parameter

from twinstep.parity.operations.controls import LR, WEIGHT_DECAY
from twinstep.parity.proof.corpus.calls import AdamCall, SgdCall, skipped
from twinstep.parity.proof.peers.peer import Peer, peer

SHELF: list[Peer] = []
MASTERS = ("fp32", "fp16", "bf16", "fp32-to-bf16")
PURE = ("fp16-pure", "bf16-pure")
NO_GPU = "" if torch.cuda.is_available() else "capturable=True needs a GPU"


def adam_with(
    kind: type[torch.optim.Optimizer],
    call: AdamCall,
    moments: tuple[list[Tensor], list[Tensor]] | None = None,
    *,
    own_counter: bool = False,
    **flags: bool,
) -> None:
    """One step of torch's class; `moments` replaces the fp32 ones."""
    if skipped(call) or not call.params:
        return
    params = [Parameter(p) for p in call.params]
    firsts, seconds = moments or (call.exp_avgs, call.exp_avg_sqs)
    optimizer = cast(Callable[..., torch.optim.Optimizer], kind)(
        params,
        lr=float(call.lr),
        betas=(float(call.beta1), float(call.beta2)),
        eps=float(call.eps),
        weight_decay=float(call.weight_decay),
        **flags,
    )
    rows = zip(params, call.grads, firsts, seconds, call.steps, strict=True)
    for p, g, m, v, t in rows:
        p.grad = (g.float() * call.factor).to(p.dtype)
        optimizer.state[p] = {"step": t.to(torch.float32), "exp_avg": m, "exp_avg_sq": v}
    optimizer.step()
    for p, t in zip(params, call.steps, strict=True):
        t.copy_(optimizer.state[p]["step"].to(torch.int64) if own_counter else t + 1)
    for c, weights in zip(call.copies, call.params, strict=False):
        c.copy_(weights)


def narrow_moments(kind: type[torch.optim.Optimizer], call: AdamCall, **flags: bool) -> None:
    """One step with the state that torch makes for 16-bit parameters: 16-bit moments."""
    firsts = [m.to(p.dtype) for m, p in zip(call.exp_avgs, call.params, strict=True)]
    seconds = [v.to(p.dtype) for v, p in zip(call.exp_avg_sqs, call.params, strict=True)]
    adam_with(kind, call, (firsts, seconds), **flags)
    if not skipped(call):
        for wide, narrow in zip(
            [*call.exp_avgs, *call.exp_avg_sqs], [*firsts, *seconds], strict=True
        ):
            wide.copy_(narrow)


# Negative ones are refused.
NOT_NEGATIVE = {
    row.name: tuple(value for value in row.values if value >= 0.0) for row in (LR, WEIGHT_DECAY)
}
ALWAYS = {**NOT_NEGATIVE, "bias_correction": (True,)}
NO_FACTOR = {**ALWAYS, "factor": (1.0,)}
adamw = partial(peer, SHELF, "adamw_step", package="torch", pinned=ALWAYS)
pure_adamw = partial(peer, SHELF, "adamw_step", package="torch", dtypes=PURE, pinned=NO_FACTOR)
adam = partial(peer, SHELF, "adam_step", package="torch", dtypes=MASTERS, pinned=ALWAYS)


@adamw(dtypes=MASTERS)
def torch_adamw_loop(call: AdamCall) -> None:
    """torch.optim.AdamW(foreach=False): one tensor at a time."""
    adam_with(torch.optim.AdamW, call, foreach=False)


@adamw(dtypes=MASTERS)
def torch_adamw_foreach(call: AdamCall) -> None:
    """torch.optim.AdamW(foreach=True)."""
    adam_with(torch.optim.AdamW, call, foreach=True)


@adamw(dtypes=MASTERS)
def torch_adamw_fused(call: AdamCall) -> None:
    """torch.optim.AdamW(fused=True)."""
    adam_with(torch.optim.AdamW, call, fused=True)


@adamw(dtypes=("fp32",))
def torch_adamw_counter(call: AdamCall) -> None:
    """torch.optim.AdamW(fused=True) with its own step counters."""
    adam_with(torch.optim.AdamW, call, own_counter=True, fused=True)


@adamw(dtypes=MASTERS, needs=NO_GPU)
def torch_adamw_capturable(call: AdamCall) -> None:
    """torch.optim.AdamW(capturable=True)."""
    adam_with(torch.optim.AdamW, call, capturable=True)


@pure_adamw()
def torch_adamw_fused_pure(call: AdamCall) -> None:
    """torch.optim.AdamW(fused=True) on 16-bit parameters, with the 16-bit moments it makes."""
    narrow_moments(torch.optim.AdamW, call, fused=True)


@pure_adamw()
def torch_adamw_loop_pure(call: AdamCall) -> None:
    """torch.optim.AdamW(foreach=False) on 16-bit parameters, with the 16-bit moments it makes."""
    narrow_moments(torch.optim.AdamW, call, foreach=False)


@adam()
def torch_adam_loop(call: AdamCall) -> None:
    """torch.optim.Adam(foreach=False): one tensor at a time."""
    adam_with(torch.optim.Adam, call, foreach=False)


@adam()
def torch_adam_foreach(call: AdamCall) -> None:
    """torch.optim.Adam(foreach=True)."""
    adam_with(torch.optim.Adam, call, foreach=True)


@adam()
def torch_adam_fused(call: AdamCall) -> None:
    """torch.optim.Adam(fused=True)."""
    adam_with(torch.optim.Adam, call, fused=True)


def sgd_with(call: SgdCall, **flags: bool) -> None:
    """One step of torch.optim.SGD; its first step is the one without a buffer."""
    if skipped(call) or not call.params:
        return
    params = [Parameter(p) for p in call.params]
    optimizer = torch.optim.SGD(
        params,
        lr=float(call.lr),
        momentum=float(call.momentum) if call.momentums else 0.0,
        dampening=float(call.dampening),
        weight_decay=float(call.weight_decay),
        nesterov=call.nesterov and bool(call.momentums),
        **flags,
    )
    for place, (p, g, t) in enumerate(zip(params, call.grads, call.steps, strict=True)):
        p.grad = (g.float() * call.factor).to(p.dtype)
        if call.momentums and int(t) > 0:
            optimizer.state[p]["momentum_buffer"] = call.momentums[place]
    optimizer.step()
    for place, p in enumerate(params):
        call.steps[place].add_(1)
        if call.momentums:
            call.momentums[place].copy_(optimizer.state[p]["momentum_buffer"])
        if call.copies:
            call.copies[place].copy_(call.params[place])


MOMENTUM = {**NOT_NEGATIVE, "momentum": (0.85,), "nesterov": (False,)}
# Nesterov momentum with dampening is refused.
NESTEROV = {**MOMENTUM, "nesterov": (True,), "dampening": (0.0,)}
sgd = partial(peer, SHELF, "sgd_step", package="torch", dtypes=MASTERS)


@sgd(pinned=MOMENTUM)
def torch_sgd_loop(call: SgdCall) -> None:
    """torch.optim.SGD(momentum=0.85, foreach=False)."""
    sgd_with(call, foreach=False)


@sgd(pinned=MOMENTUM)
def torch_sgd_fused(call: SgdCall) -> None:
    """torch.optim.SGD(momentum=0.85, fused=True)."""
    sgd_with(call, fused=True)


@sgd(pinned=NESTEROV)
def torch_sgd_nesterov(call: SgdCall) -> None:
    """torch.optim.SGD(momentum=0.85, nesterov=True, foreach=True)."""
    sgd_with(call, foreach=True)
