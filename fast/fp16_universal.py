"""DeepSpeed's universal checkpoints in the FP16 optimizers, which keep whole masters."""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from twinstep.contract.moments import StateDict
from twinstep.fast.bf16_universal import Whole, dict_inside, read_group, saved_options
from twinstep.fast.checkpoint import ScalerRecord, read_checkpoint
from twinstep.fast.fp16_optimizer import FP16Optimizer
from twinstep.fast.fp16_unfused_optimizer import FP16UnfusedOptimizer
from twinstep.fast.saved import FLAT, UNFUSED, scale_to_save
from twinstep.fast.scalers import LossScale


def load_universal_checkpoint(
    optimizer: FP16Optimizer | FP16UnfusedOptimizer,
    folder: Path,
    param_names: Mapping[Tensor, str] | Mapping[nn.Parameter, str],
    load_optimizer_states: bool = True,
) -> None:
    """Load masters, states, steps and hyper-parameters by parameter name, and publish the masters.

    A dynamic scale goes on from that of the file, counters included, where the file has one: those
    of ZeRO on fp16. Otherwise the loss scale stays as it is, and the clip norm always. The device
    is waited for.

    Args:
        optimizer: written, with its model weights.
        folder: as `deepspeed.checkpoint.ds_to_universal` writes it.
        param_names: a name for every trained parameter.
        load_optimizer_states: False leaves the state of the optimizer inside.

    Raises:
        ValueError: something does not fit; the sentence says what. Nothing has changed.
    """
    called: dict[Tensor, str] = dict(param_names.items())
    lacking = [param for param in chain(*optimizer.fp16_groups) if param not in called]
    if lacking:
        raise ValueError(
            f"param_names has no name for {len(lacking)} parameters, the first of shape "
            f"{tuple(lacking[0].shape)} [{type(optimizer).__name__}]"
        )
    options = saved_options(folder, len(optimizer.fp16_groups))
    flat = isinstance(optimizer, FP16Optimizer)
    masters: list[Tensor | list[Tensor]] = []
    held: list[StateDict] = []
    for group in optimizer.fp16_groups:
        wholes, step = read_group(folder, {called[param]: param for param in group})
        rows = [_shaped(wholes.get(called[param]), param) for param in group]
        rows = [_end_to_end(rows)] if flat else rows
        weights = [row.pop("fp32") for row in rows]
        masters.append(weights[0] if flat else weights)
        held += [{"step": torch.tensor(float(step)), **row} if row else {} for row in rows]
    states = {number: state for number, state in enumerate(held) if state}
    inside = optimizer.optimizer
    loaded = inside.state_dict()
    if load_optimizer_states:
        loaded = dict_inside(inside, states, options, folder)
    optimizer.load_state_dict(
        {
            **_resumed(optimizer.loss_scaler, folder),
            "clip_grad": optimizer.clip_grad,
            "optimizer_state_dict": loaded,
            FLAT if flat else UNFUSED: masters,
        },
        load_optimizer_states=load_optimizer_states,
    )


def _resumed(scaler: LossScale, folder: Path) -> dict[str, object]:
    """What a scaler remembers, or what that of the file does; both have to be dynamic."""
    now: dict[str, object] = dict(scale_to_save(scaler))
    record = read_checkpoint(folder / "zero" / "optimizer_state.pt").get("loss_scaler")
    found = record.__dict__ if isinstance(record, ScalerRecord) else {}
    if scaler.dynamic and "last_overflow_iter" in now and found.get("dynamic") is True:
        names = ["cur_scale", "cur_iter", "last_overflow_iter"]
        names += ["cur_hysteresis"] if "cur_hysteresis" in now else []
        now.update({name: found.get(name) for name in names})
    return now


def _shaped(whole: Whole | None, param: Tensor) -> Whole:
    """What a folder holds, shaped like its parameter; an empty one has no folder and no state."""
    if whole is None:
        return {"fp32": torch.zeros(param.shape)}
    return {kind: tensor.view(param.shape) for kind, tensor in whole.items()}


def _end_to_end(rows: list[Whole]) -> Whole:
    """All parameters of a group in one tensor of each kind."""
    kinds = dict.fromkeys(kind for row in rows for kind in row) or {"fp32": None}
    return {
        kind: torch.cat([torch.zeros(0), *(row[kind].flatten() for row in rows if kind in row)])
        for kind in kinds
    }
