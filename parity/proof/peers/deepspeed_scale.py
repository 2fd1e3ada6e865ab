"""DeepSpeed's loss scalers and the clip factor of its FP16_Optimizer, by their own methods."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from twinstep.parity.proof.corpus.calls import ClipFactorCall, DynamicCall, WrapperCall
from twinstep.parity.proof.peers.installed import deepspeed
from twinstep.parity.proof.peers.peer import Peer, peer

SHELF: list[Peer] = []
SCALERS = "deepspeed.runtime.fp16.loss_scaler"
FLAT = "deepspeed.runtime.fp16.fused_optimizer"
UNFUSED = "deepspeed.runtime.fp16.unfused_optimizer"


@peer(SHELF, "update_scale_dynamic", package="deepspeed")
def deepspeed_dynamic_scaler(call: DynamicCall) -> None:
    """DynamicLossScaler.update_scale."""
    scaler = deepspeed(SCALERS).DynamicLossScaler(
        init_scale=float(call.scale),
        scale_window=int(call.scale_window),
        min_scale=float(call.min_scale),
        delayed_shift=int(call.delayed_shift),
        consecutive_hysteresis=call.consecutive_hysteresis,
        raise_error_at_min_scale=call.raise_error_at_min_scale,
    )
    scaler.scale_factor = float(call.scale_factor)
    scaler.cur_iter = int(call.cur_iter)
    scaler.last_overflow_iter = int(call.last_overflow_iter)
    scaler.cur_hysteresis = int(call.cur_hysteresis)
    try:
        scaler.update_scale(bool(call.found_inf))
    except Exception as error:
        # The error at the floor is a bare Exception; its subclasses are accidents.
        if type(error) is not Exception:
            raise
        call.exhausted.fill_(1)
        return
    call.scale.fill_(scaler.cur_scale)
    call.cur_iter.fill_(scaler.cur_iter)
    call.last_overflow_iter.fill_(scaler.last_overflow_iter)
    call.cur_hysteresis.fill_(scaler.cur_hysteresis)


def wrapper_scale(call: WrapperCall, update: object) -> None:
    """The rule that a wrapper carries itself, on the record it keeps it in."""
    config = deepspeed(SCALERS).LossScaleConfig(
        torch.float16,
        True,
        1.0,
        {
            "init_scale": float(call.scale),
            "scale_window": int(call.scale_window),
            "min_scale": float(call.min_scale),
        },
    )
    config.scale_factor = float(call.scale_factor)
    config.cur_scale = float(call.scale)
    config.cur_iter = int(call.cur_iter)
    config.last_overflow_iter = int(call.last_overflow_iter)
    assert callable(update)
    update(SimpleNamespace(loss_scale_config=config, verbose=False), bool(call.found_inf))
    call.scale.fill_(config.cur_scale)
    call.cur_iter.fill_(config.cur_iter)
    call.last_overflow_iter.fill_(config.last_overflow_iter)


@peer(SHELF, "update_scale_wrapper", package="deepspeed")
def deepspeed_flat_scale(call: WrapperCall) -> None:
    """FP16_Optimizer._update_scale."""
    wrapper_scale(call, deepspeed(FLAT).FP16_Optimizer._update_scale)


@peer(SHELF, "update_scale_wrapper", package="deepspeed")
def deepspeed_unfused_scale(call: WrapperCall) -> None:
    """FP16_UnfusedOptimizer._update_scale."""
    wrapper_scale(call, deepspeed(UNFUSED).FP16_UnfusedOptimizer._update_scale)


@peer(SHELF, "clip_factor", package="deepspeed")
def deepspeed_clip_factor(call: ClipFactorCall) -> None:
    """FP16_Optimizer.unscale_and_clip_grads on a gradient of one: what it is multiplied by."""
    gradient = torch.ones(1)
    this = SimpleNamespace(
        clip_grad=float(call.max_norm),
        loss_scale_config=SimpleNamespace(cur_scale=float(call.scale)),
    )
    unscale = deepspeed(FLAT).FP16_Optimizer.unscale_and_clip_grads
    unscale(this, [gradient], call.norm)
    call.factor.copy_(gradient[0])
