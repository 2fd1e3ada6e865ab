"""DeepSpeed's universal checkpoints in the FP16 optimizers, which keep whole masters."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from twinstep.contract.moments import StateDict
from twinstep.reference.checkpoint import SavedScaler, read_checkpoint
from twinstep.reference.fp16_optimizer import FP16Optimizer
from twinstep.reference.fp16_unfused_optimizer import FP16UnfusedOptimizer
from twinstep.reference.saved_scale import saved_scale
from twinstep.reference.scalers import LossScale
from twinstep.reference.universal import (
    WEIGHT,
    Parameter,
    common_step,
    group_options,
    inner_dict,
    read_parameters,
)


def load_universal_checkpoint(
    optimizer: FP16Optimizer | FP16UnfusedOptimizer,
    folder: Path,
    param_names: Mapping[Tensor, str] | Mapping[nn.Parameter, str],
    load_optimizer_states: bool = True,
) -> None:
    """Load masters, states, steps and hyper-parameters by parameter name, and publish the masters.

    A dynamic scale goes on from that of the file, counters included, where the file has one: those
    of ZeRO on fp16. Otherwise the loss scale stays as it is, and the clip norm always.

    Args:
        optimizer: written, with its model weights.
        folder: as `deepspeed.checkpoint.ds_to_universal` writes it.
        param_names: a name for every trained parameter.
        load_optimizer_states: False leaves the state of the optimizer inside.

    Raises:
        ValueError: something does not fit; the sentence says what. Nothing has changed.
    """
    names: dict[Tensor, str] = dict(param_names.items())
    where = f"{type(optimizer).__name__}, universal checkpoint"
    for param in chain.from_iterable(optimizer.fp16_groups):
        if param not in names:
            shape = tuple(param.shape)
            raise ValueError(f"param_names has no name for a parameter of shape {shape} [{where}]")
    options = group_options(folder, len(optimizer.fp16_groups))
    wholes = [
        read_parameters(folder, [names[param] for param in group], group)
        for group in optimizer.fp16_groups
    ]
    key, masters, states = (
        _flat(optimizer, wholes, folder)
        if isinstance(optimizer, FP16Optimizer)
        else _unfused(optimizer, wholes, names, folder)
    )
    state_dict: StateDict = {
        **saved_scale(optimizer.loss_scaler),
        **_scale_in(folder, optimizer.loss_scaler),
        "clip_grad": optimizer.clip_grad,
        "optimizer_state_dict": optimizer.optimizer.state_dict(),
        key: masters,
    }
    if load_optimizer_states:
        inside = inner_dict(optimizer.optimizer, states, options, folder)
        state_dict["optimizer_state_dict"] = inside
    optimizer.load_state_dict(state_dict, load_optimizer_states=load_optimizer_states)


def _scale_in(folder: Path, scaler: LossScale) -> Mapping[str, object]:
    """Scale and counters of the file, if its rule and ours are dynamic and count the same."""
    saved = read_checkpoint(folder / "zero" / "optimizer_state.pt").get("loss_scaler")
    if not isinstance(saved, SavedScaler):
        return {}
    own, held = scaler.state_dict(), vars(saved)
    if not (own["dynamic_loss_scale"] and held.get("dynamic") is True) or not own.keys() >= SCALE:
        return {}
    return {key: held.get(key) for key in own.keys() & {*SCALE, "cur_hysteresis"}}


SCALE = {"cur_scale", "cur_iter", "last_overflow_iter"}
Read = tuple[str, list[object], dict[int, dict[str, object]]]


def _flat(optimizer: FP16Optimizer, wholes: list[dict[str, Parameter]], folder: Path) -> Read:
    """Masters end to end, and the state of each."""
    masters: list[object] = []
    states: dict[int, dict[str, object]] = {}
    for number, whole in enumerate(wholes):
        columns: dict[str, list[Tensor]] = {}
        for one in whole.values():
            for key, tensor in one.tensors.items():
                columns.setdefault(key, []).append(tensor)
        flats = {key: torch.cat(column) for key, column in columns.items()}
        masters.append(flats.pop(WEIGHT, torch.zeros_like(optimizer.fp32_groups_flat[number])))
        if flats:
            states[number] = {"step": torch.tensor(float(common_step(whole, folder))), **flats}
    return "fp32_groups_flat", masters, states


def _unfused(
    optimizer: FP16UnfusedOptimizer,
    wholes: list[dict[str, Parameter]],
    names: Mapping[Tensor, str],
    folder: Path,
) -> Read:
    """Masters by group, and the state of each; empty parameters have neither."""
    masters: list[object] = []
    states: dict[int, dict[str, object]] = {}
    number = 0
    for group, whole in zip(optimizer.fp16_groups, wholes, strict=True):
        row: list[Tensor] = []
        step = float(common_step(whole, folder))
        for param in group:
            one = whole.get(names[param])
            if one is None:
                row.append(torch.zeros_like(param, dtype=torch.float32))
            else:
                shaped = {key: flat.view(param.shape) for key, flat in one.tensors.items()}
                row.append(shaped.pop(WEIGHT))
                if shaped:
                    states[number] = {"step": torch.tensor(step), **shaped}
            number += 1
        masters.append(row)
    return "fp32_groups", masters, states
