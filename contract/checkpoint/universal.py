"""DeepSpeed's universal checkpoints: one folder per parameter, loaded by any number of ranks.

<folder>/zero/optimizer_state.pt     hyper-parameters of the groups
<folder>/zero/<name>/fp32.pt         {"param": the whole weight}
<folder>/zero/<name>/<state>.pt      {"param": the whole state}
<folder>/zero/<name>/step.pt         completed steps, a number

A group is read whole before the next one, and everything before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from twinstep.contract.agreement import device_of, on_all_ranks
from twinstep.contract.checkpoint.entries import FLAT, SAME, UNFUSED, Loaded
from twinstep.contract.checkpoint.files import SavedScaler, read_checkpoint, read_number
from twinstep.contract.checkpoint.fp16 import INNER
from twinstep.contract.checkpoint.inner import inner_state
from twinstep.contract.fragments import Partition
from twinstep.contract.loss_scale import Saved
from twinstep.contract.moments import StateDict, whole_steps
from twinstep.contract.parallel import Groups
from twinstep.contract.tensors import check_in_memory

Options = Mapping[str, object]
# By name: `fp32` is the weight, others are states.
Whole = dict[str, Tensor]
WEIGHT = "fp32"
SCALE = ("cur_scale", "cur_iter", "last_overflow_iter")


class Scaler(Protocol):
    """A loss scaler."""

    def state_dict(self) -> Saved:
        """State that the rule remembers."""


class FP16Wrapper(Protocol):
    """`FP16Optimizer` or `FP16UnfusedOptimizer` of either side."""

    loss_scaler: Scaler
    clip_grad: float
    ranks: Groups

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The trained parameters, by group."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer."""

    def load_state_dict(self, state_dict: StateDict, load_optimizer_states: bool = True) -> None:
        """Load a state of this class."""


def read_partitions(
    groups: Sequence[Partition],
    optimizer: torch.optim.Optimizer,
    folder: Path,
    ranks: Groups,
    *,
    states: bool = True,
) -> Loaded:
    """Read what this rank needs for `BF16Optimizer`.

    Args:
        groups: as they are now.
        optimizer: the inner one.
        folder: of the checkpoint.
        ranks: groups of all ranks that load.
        states: the state of the inner optimizer is asked for, too.

    Raises:
        ValueError: a file is missing or broken, a parameter has another number of elements, states
            or steps differ within a group, or groups do not match; here or on another rank.
    """
    return on_all_ranks(
        lambda: _read_partitions(groups, optimizer, folder, states),
        ranks,
        groups[0].flat.device,
        same=SAME,
    )


def _read_partitions(
    groups: Sequence[Partition], optimizer: torch.optim.Optimizer, folder: Path, states: bool
) -> Loaded:
    """The same, on this rank."""
    options = group_options(folder, len(groups))
    masters: list[Tensor] = []
    held: dict[int, StateDict] = {}
    for number, group in enumerate(groups):
        wholes, step = read_group(folder, dict(zip(group.names, group.params, strict=True)))
        kinds = next(iter(wholes.values()), {WEIGHT: torch.zeros(0)})
        flats = {kind: _own_part(group, wholes, kind) for kind in kinds}
        masters.append(flats.pop(WEIGHT))
        if flats:
            # Ranks that own only padding have the step of the others.
            held[number] = {"step": torch.tensor(float(step)), **flats}
    inner = _inner(optimizer, held, options, folder) if states else None
    return Loaded(inner=inner, masters=masters, clip_grad=None)


def _own_part(group: Partition, wholes: Mapping[str, Whole], kind: str) -> Tensor:
    """This rank's partition of one kind of tensor; zeros where no parameter lies."""
    flat = torch.zeros(group.partition_size)
    for name, fragment in group.fragments.items():
        own, there = fragment.in_partition, fragment.in_param
        part = wholes[name][kind].narrow(0, there.start, there.numel)
        flat.narrow(0, own.start, own.numel).copy_(part)
    return flat


def load_universal_checkpoint(
    optimizer: FP16Wrapper,
    folder: Path,
    param_names: Mapping[Tensor, str] | Mapping[nn.Parameter, str],
    load_optimizer_states: bool = True,
) -> None:
    """Load masters, states, steps and hyper-parameters by parameter name; publish the masters.

    A dynamic scale goes on from that of the file, counters included, where the file has one: those
    of ZeRO on fp16. Otherwise the loss scale stays, and the clip norm always. The device is waited
    for.

    Args:
        optimizer: written, with its model weights.
        folder: as `deepspeed.checkpoint.ds_to_universal` writes it.
        param_names: a name for every trained parameter.
        load_optimizer_states: False leaves the state of the inner optimizer.

    Raises:
        ValueError: something does not fit, here or on another rank; the sentence names it. Nothing
            has changed.
    """
    state_dict = on_all_ranks(
        lambda: _read_wrapper(optimizer, folder, param_names, load_optimizer_states),
        optimizer.ranks,
        device_of(optimizer.optimizer),
    )
    optimizer.load_state_dict(state_dict, load_optimizer_states=load_optimizer_states)


def _read_wrapper(
    optimizer: FP16Wrapper,
    folder: Path,
    param_names: Mapping[Tensor, str] | Mapping[nn.Parameter, str],
    load_optimizer_states: bool,
) -> StateDict:
    """A state dict of the wrapper's class."""
    names: dict[Tensor, str] = dict(param_names.items())
    nameless = [p for p in chain.from_iterable(optimizer.fp16_groups) if p not in names]
    if nameless:
        raise ValueError(
            f"param_names has no name for {len(nameless)} parameters, the first of shape "
            f"{tuple(nameless[0].shape)} [{type(optimizer).__name__}]"
        )
    options = group_options(folder, len(optimizer.fp16_groups))
    is_flat = hasattr(optimizer, FLAT)
    masters: list[Tensor | list[Tensor]] = []
    held: list[StateDict] = []
    for group in optimizer.fp16_groups:
        wholes, step = read_group(folder, {names[param]: param for param in group})
        rows = [_shaped(wholes.get(names[param]), param) for param in group]
        rows = [_end_to_end(rows)] if is_flat else rows
        weights = [row.pop(WEIGHT) for row in rows]
        masters.append(weights[0] if is_flat else weights)
        held += [{"step": torch.tensor(float(step)), **row} if row else {} for row in rows]
    inner = optimizer.optimizer.state_dict()
    if load_optimizer_states:
        states = {number: state for number, state in enumerate(held) if state}
        inner = _inner(optimizer.optimizer, states, options, folder)
    return {
        **_resumed(optimizer.loss_scaler, folder),
        "clip_grad": optimizer.clip_grad,
        INNER: inner,
        FLAT if is_flat else UNFUSED: masters,
    }


def _resumed(scaler: Scaler, folder: Path) -> dict[str, object]:
    """State of the scaler, or that of the file if both are dynamic and count the same."""
    now: dict[str, object] = dict(scaler.state_dict())
    saved = read_checkpoint(folder / "zero" / "optimizer_state.pt").get("loss_scaler")
    theirs = vars(saved) if isinstance(saved, SavedScaler) else {}
    if theirs.get("dynamic") is True and now.keys() >= {*SCALE}:
        now |= {key: theirs.get(key) for key in (*SCALE, "cur_hysteresis") if key in now}
    return now


def _shaped(whole: Whole | None, param: Tensor) -> Whole:
    """Tensors of a folder, shaped like the parameter; an empty one has no folder and no state."""
    if whole is None:
        return {WEIGHT: torch.zeros(param.shape)}
    return {kind: tensor.view(param.shape) for kind, tensor in whole.items()}


def _end_to_end(rows: Sequence[Whole]) -> Whole:
    """All parameters of a group in one tensor of each kind."""
    kinds = dict.fromkeys(kind for row in rows for kind in row) or {WEIGHT: None}
    return {
        kind: torch.cat([torch.zeros(0), *(row[kind].flatten() for row in rows if kind in row)])
        for kind in kinds
    }


def group_options(folder: Path, count: int) -> list[Options]:
    """Hyper-parameters by group; empty ones where the checkpoint has none.

    Raises:
        ValueError: the file is missing or broken, or has another number of groups.
    """
    file = _existing(folder / "zero" / "optimizer_state.pt")
    found = read_checkpoint(file).get("param_groups", [])
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise ValueError(f"param_groups of {file.name} should be a list of dicts, but are not")
    if found and len(found) != count:
        raise ValueError(f"{file.name} has {len(found)} groups, but should have {count} [{folder}]")
    return found or [{} for _ in range(count)]


def read_group(folder: Path, params: Mapping[str, Tensor]) -> tuple[dict[str, Whole], int]:
    """Read the parameters of one group by name; empty ones have no folder.

    Returns:
        By name, the weight and every state, whole, 1-D and fp32; and completed steps, 0 where the
        folders do not say.

    Raises:
        ValueError: a file is missing or broken, has another number of elements, or parameters have
            different states or steps.
    """
    wholes: dict[str, Whole] = {}
    steps: list[int] = []
    for name, param in params.items():
        if param.numel() == 0:
            continue
        place = folder / "zero" / name
        _existing(place / f"{WEIGHT}.pt")
        files = [file for file in sorted(place.glob("*.pt")) if file.stem != "step"]
        wholes[name] = {file.stem: _read_whole(file, param) for file in files}
        first = next(iter(wholes.values()))
        if wholes[name].keys() != first.keys():
            raise ValueError(
                f"{name} has {', '.join(wholes[name])}, but should have {', '.join(first)} like "
                f"the first parameter of its group [{folder}]"
            )
        count = read_number(place / "step.pt") if (place / "step.pt").exists() else 0.0
        steps.append(whole_steps(count, str(place)))
    if len(set(steps)) > 1:
        found = ", ".join(map(str, sorted(set(steps))))
        raise ValueError(f"parameters of one group have steps {found}, but should agree [{folder}]")
    return wholes, max(steps, default=0)


def _read_whole(file: Path, param: Tensor) -> Tensor:
    tensor, where = read_checkpoint(file).get("param"), str(file.parent)
    label = f"{file.name} of {file.parent.name}"
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{label} has no tensor under param, but should have one [{where}]")
    check_in_memory(tensor, label, where)
    if tensor.numel() != param.numel():
        raise ValueError(
            f"{label} has {tensor.numel()} elements, but should have {param.numel()} [{where}]"
        )
    if tensor.dim() > 1 and tensor.shape != param.shape:
        raise ValueError(
            f"{label} has shape {tuple(tensor.shape)}, but should have {tuple(param.shape)} "
            f"[{where}]"
        )
    if tensor.dtype != torch.float32:
        raise ValueError(f"{label} is {tensor.dtype}, but should be torch.float32 [{where}]")
    return tensor.detach().flatten()


def _inner(
    optimizer: torch.optim.Optimizer,
    held: Mapping[int, StateDict],
    options: Sequence[Options],
    folder: Path,
) -> StateDict:
    """A dict for the inner optimizer; options that it does not know are left out."""
    own = optimizer.state_dict()
    groups = [
        {**group, **{key: given[key] for key in given if key in group and key != "params"}}
        for group, given in zip(cast("list[StateDict]", own["param_groups"]), options, strict=True)
    ]
    whole = {**own, "state": dict(held), "param_groups": groups}
    return inner_state(optimizer, whole, str(folder))


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise ValueError(f"{file} does not exist, but should in a universal checkpoint")
    return file
