"""What torch.amp.GradScaler and torch.nn.utils do: unscale, overflow, scale, norm, clip.

GradScaler itself refuses CPU tensors in places, so the adapters call the operators that its methods
consist of.
"""

from __future__ import annotations

import torch
from torch.nn import Parameter

from twinstep.parity.proof.corpus.calls import (
    ClipCoefficientCall,
    GlobalNormCall,
    TorchScaleCall,
    UnscaleCall,
)
from twinstep.parity.proof.peers.peer import Peer, peer

SHELF: list[Peer] = []


@peer(SHELF, "unscale", package="torch", dtypes=("fp32", "fp16", "bf16"))
def torch_unscale(call: UnscaleCall) -> None:
    """GradScaler.unscale_: the operator that it calls, over all gradients at once."""
    found = call.found_inf.reshape(1)
    if call.grads:
        torch._amp_foreach_non_finite_check_and_unscale_(call.grads, found, call.inv_scale)


@peer(SHELF, "update_scale_torch", package="torch")
def torch_update_scale(call: TorchScaleCall) -> None:
    """GradScaler.update: the operator that it calls, scale in fp32 and tracker in int32."""
    scale = call.scale.to(torch.float32)
    tracker = call.growth_tracker.to(torch.int32)
    torch._amp_update_scale_(
        scale,
        tracker,
        call.found_inf,
        float(call.growth_factor),
        float(call.backoff_factor),
        int(call.growth_interval),
    )
    call.scale.copy_(scale)
    call.growth_tracker.copy_(tracker)


@peer(SHELF, "global_norm", package="torch", dtypes=("fp32", "fp16", "bf16"))
def torch_total_norm(call: GlobalNormCall) -> None:
    """torch.nn.utils.get_total_norm; overflow is read off the norm, as error_if_nonfinite does."""
    norm = torch.nn.utils.get_total_norm(call.grads)
    call.norm.copy_(norm)
    if not bool(torch.isfinite(norm)):
        call.found_inf.fill_(1.0)


@peer(SHELF, "global_norm", package="torch", dtypes=("fp32", "fp16", "bf16"))
def torch_total_norm_foreach(call: GlobalNormCall) -> None:
    """torch.nn.utils.get_total_norm(foreach=True)."""
    norm = torch.nn.utils.get_total_norm(call.grads, foreach=True)
    call.norm.copy_(norm)
    if not bool(torch.isfinite(norm)):
        call.found_inf.fill_(1.0)


@peer(SHELF, "clip_coefficient", package="torch")
def torch_clip(call: ClipCoefficientCall) -> None:
    """torch.nn.utils.clip_grads_with_norm_ on a gradient of one: what it is multiplied by."""
    param = Parameter(torch.zeros(1))
    param.grad = torch.ones(1)
    torch.nn.utils.clip_grads_with_norm_([param], float(call.max_norm), call.norm)
    call.factor.copy_(param.grad[0])
