"""DeepSpeedCPUAdam, the C++ optimizer of DeepSpeed's CPU offload, through its public class.

The first use compiles it, which takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module

import torch
from torch.nn import Parameter

from twinstep.parity.proof.corpus.calls import AdamCall, skipped
from twinstep.parity.proof.peers.installed import without_compiler
from twinstep.parity.proof.peers.peer import Peer, peer

SHELF: list[Peer] = []
MASTERS = ("fp32", "fp16", "bf16", "fp32-to-bf16")
PURE = ("fp16-pure", "bf16-pure")
NO_FACTOR = {"factor": (1.0,)}


@cache
def optimizer_class() -> Callable[..., torch.optim.Optimizer]:
    """DeepSpeedCPUAdam, in a process that asks for its CPU once.

    Every optimizer that is built asks for the vendor of the CPU, which starts processes and takes
    a second; the judge builds thousands.
    """
    found = import_module("cpuinfo")
    vars(found)["get_cpu_info"] = cache(found.get_cpu_info)
    made: Callable[..., torch.optim.Optimizer] = import_module(
        "deepspeed.ops.adam"
    ).DeepSpeedCPUAdam
    return made


def cpu_adam(call: AdamCall, *, decoupled: bool) -> None:
    """One step of DeepSpeedCPUAdam over the caller's memory."""
    if skipped(call) or not call.params:
        return
    params = [Parameter(p) for p in call.params]
    optimizer = optimizer_class()(
        params,
        lr=float(call.lr),
        betas=(float(call.beta1), float(call.beta2)),
        eps=float(call.eps),
        weight_decay=float(call.weight_decay),
        bias_correction=call.bias_correction,
        adamw_mode=decoupled,
        fp32_optimizer_states=True,
    )
    rows = zip(params, call.grads, call.exp_avgs, call.exp_avg_sqs, call.steps, strict=True)
    for p, g, m, v, t in rows:
        p.grad = (g.float() * call.factor).to(p.dtype)
        optimizer.state[p] = {"step": int(t), "exp_avg": m, "exp_avg_sq": v}
    optimizer.step()
    for p, t in zip(params, call.steps, strict=True):
        t.fill_(optimizer.state[p]["step"])
    for c, weights in zip(call.copies, call.params, strict=False):
        c.copy_(weights)


@peer(SHELF, "adamw_step", package="deepspeed", dtypes=MASTERS, needs=without_compiler())
def deepspeed_cpu_adamw(call: AdamCall) -> None:
    """DeepSpeedCPUAdam(adamw_mode=True) on fp32 masters."""
    cpu_adam(call, decoupled=True)


@peer(SHELF, "adam_step", package="deepspeed", dtypes=MASTERS, needs=without_compiler())
def deepspeed_cpu_adam(call: AdamCall) -> None:
    """DeepSpeedCPUAdam(adamw_mode=False) on fp32 masters."""
    cpu_adam(call, decoupled=False)


@peer(
    SHELF,
    "adamw_step",
    package="deepspeed",
    dtypes=PURE,
    pinned=NO_FACTOR,
    needs=without_compiler(),
)
def deepspeed_cpu_adamw_pure(call: AdamCall) -> None:
    """DeepSpeedCPUAdam(adamw_mode=True) on 16-bit parameters with fp32 moments."""
    cpu_adam(call, decoupled=True)
