"""DeepSpeed's norms, its clip and its overflow test, as its optimizers call them."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from twinstep.parity.proof.corpus.calls import ClipCoefficientCall, GlobalNormCall
from twinstep.parity.proof.peers.installed import deepspeed
from twinstep.parity.proof.peers.peer import Peer, peer

SHELF: list[Peer] = []
UTILS = "deepspeed.runtime.utils"
DTYPES = ("fp32", "fp16", "bf16", "mixed")


def overflow(call: GlobalNormCall) -> bool:
    """CheckOverflow.has_overflow_serial on parameters that hold the gradients."""
    checker = deepspeed(UTILS).CheckOverflow()
    return bool(checker.has_overflow_serial(parameters(call)))


def parameters(call: GlobalNormCall) -> list[Parameter]:
    """Parameters whose gradients are the call's."""
    held = []
    for gradient in call.grads:
        param = Parameter(torch.empty_like(gradient))
        param.grad = gradient
        held.append(param)
    return held


@peer(SHELF, "global_norm", package="deepspeed", dtypes=DTYPES)
def deepspeed_norm_of_tensors(call: GlobalNormCall) -> None:
    """get_global_norm_of_tensors (BF16_Optimizer, clipping), with CheckOverflow."""
    if overflow(call):
        call.found_inf.fill_(1.0)
    call.norm.fill_(float(deepspeed(UTILS).get_global_norm_of_tensors(call.grads)))


@peer(SHELF, "global_norm", package="deepspeed", dtypes=DTYPES)
def deepspeed_flattened_norm(call: GlobalNormCall) -> None:
    """get_flattened_grad_norm (FP16_Optimizer), with CheckOverflow."""
    if overflow(call):
        call.found_inf.fill_(1.0)
    call.norm.fill_(float(deepspeed(UTILS).get_flattened_grad_norm(parameters(call))))


@peer(SHELF, "clip_coefficient", package="deepspeed")
def deepspeed_clip_by_norm(call: ClipCoefficientCall) -> None:
    """clip_tensors_by_global_norm on a gradient of one: what it is multiplied by."""
    gradient = torch.ones(1)
    deepspeed(UTILS).clip_tensors_by_global_norm(
        [gradient], max_norm=float(call.max_norm), global_norm=float(call.norm)
    )
    call.factor.copy_(gradient[0])
