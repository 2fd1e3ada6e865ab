"""Universal checkpoints: one folder per parameter, so that any number of ranks can load them.

<folder>/zero/optimizer_state.pt     hyper-parameters of the groups
<folder>/zero/<name>/fp32.pt         {"param": the whole weight}
<folder>/zero/<name>/<state>.pt      {"param": the whole state}
<folder>/zero/<name>/step.pt         completed steps, a number

A group is read whole before the next one, and everything before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from twinstep.contract.agreement import on_all_ranks
from twinstep.contract.moments import StateDict, whole_steps
from twinstep.contract.tensors import check_in_memory
from twinstep.reference.bf16_groups import PartitionedGroup
from twinstep.reference.bf16_state import Loaded
from twinstep.reference.checkpoint import read_checkpoint, read_number
from twinstep.reference.fitting import fitting

WEIGHT = "fp32"


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """What the folder of one parameter holds.

    Attributes:
        tensors: 1-D and whole, fp32, by name: `fp32` is the weight, others are states.
        step: completed steps; 0 where the folder does not say.
    """

    tensors: dict[str, Tensor]
    step: int


def read(
    groups: Sequence[PartitionedGroup],
    optimizer: torch.optim.Optimizer,
    folder: Path,
    *,
    states: bool = True,
) -> Loaded:
    """Read what this rank needs.

    Args:
        groups: as they are now.
        optimizer: the one inside.
        folder: of the checkpoint.
        states: the state of the optimizer inside is asked for, too.

    Raises:
        ValueError: a file is missing or broken, a parameter has another number of elements, states
            or steps differ within a group, or groups do not match; here or on another rank.
    """
    return on_all_ranks(
        lambda: _read(groups, optimizer, folder, states),
        [group.process_group for group in groups],
        groups[0].master.device,
    )


def _read(
    groups: Sequence[PartitionedGroup],
    optimizer: torch.optim.Optimizer,
    folder: Path,
    states: bool,
) -> Loaded:
    """The same, on this rank."""
    options = group_options(folder, len(groups))
    masters, held = [], dict[int, dict[str, object]]()
    for number, group in enumerate(groups):
        whole = read_parameters(folder, group.names, group.params)
        flats = {key: _partition(group, whole, key) for key in _keys(whole)}
        master = flats.pop(WEIGHT, None)
        masters.append(torch.zeros(group.partition_size) if master is None else master)
        if flats:
            # Steps are those of every parameter: a rank that owns only padding needs them too.
            held[number] = {"step": torch.tensor(float(common_step(whole, folder))), **flats}
    inner = inner_dict(optimizer, held, options, folder) if states else None
    return Loaded(inner=inner, masters=masters, clip_grad=None)


def group_options(folder: Path, count: int) -> list[Mapping[str, object]]:
    """Hyper-parameters by group; empty ones where the checkpoint has none.

    Raises:
        ValueError: the file is missing or broken, or has another number of groups.
    """
    common = _existing(folder / "zero" / "optimizer_state.pt")
    saved = read_checkpoint(common).get("param_groups", [])
    if not isinstance(saved, list) or not all(isinstance(group, dict) for group in saved):
        raise ValueError(f"param_groups of {common.name} should be a list of dicts, but are not")
    if saved and len(saved) != count:
        raise ValueError(
            f"{common.name} has {len(saved)} groups, but should have {count} [{folder}]"
        )
    return saved or [{} for _ in range(count)]


def read_parameters(
    folder: Path, names: Sequence[str], params: Sequence[Tensor]
) -> dict[str, Parameter]:
    """The parameters of one group by name; empty ones have no folder and are left out.

    Raises:
        ValueError: a file is missing or broken, holds another number of elements, or parameters
            have different states.
    """
    found = {
        name: _read_parameter(folder / "zero" / name, param)
        for name, param in zip(names, params, strict=True)
        if param.numel()
    }
    kinds = {name: sorted(one.tensors) for name, one in found.items()}
    for name, kind in kinds.items():
        first = next(iter(kinds.values()))
        if kind != first:
            raise ValueError(
                f"{name} has {', '.join(kind)}, but should have {', '.join(first)} like the first "
                f"parameter of its group [{folder}]"
            )
    return found


def _read_parameter(folder: Path, param: Tensor) -> Parameter:
    _existing(folder / f"{WEIGHT}.pt")
    tensors = {
        file.stem: _whole(file, param)
        for file in sorted(folder.glob("*.pt"))
        if file.stem != "step"
    }
    steps = folder / "step.pt"
    number = read_number(steps) if steps.exists() else 0.0
    return Parameter(tensors=tensors, step=whole_steps(number, str(steps)))


def _whole(file: Path, param: Tensor) -> Tensor:
    tensor = read_checkpoint(file).get("param")
    place = f"{file.name} of {file.parent.name}"
    if not isinstance(tensor, Tensor) or tensor.numel() != param.numel():
        got = tensor.numel() if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{place} has {got} elements, but should have {param.numel()}")
    if tensor.dim() > 1 and tensor.shape != param.shape:
        shape = tuple(tensor.shape)
        raise ValueError(f"{place} has shape {shape}, but should have {tuple(param.shape)}")
    if tensor.dtype != torch.float32:
        raise ValueError(f"{place} is {tensor.dtype}, but should be torch.float32")
    check_in_memory(tensor, "param", place)
    return tensor.detach().reshape(-1)


def _keys(whole: Mapping[str, Parameter]) -> list[str]:
    return [key for one in list(whole.values())[:1] for key in one.tensors]


def common_step(whole: Mapping[str, Parameter], folder: Path) -> int:
    """Completed steps of a group.

    Raises:
        ValueError: its parameters disagree.
    """
    steps = sorted({one.step for one in whole.values()})
    if len(steps) > 1:
        said = ", ".join(str(step) for step in steps)
        raise ValueError(f"parameters of one group have steps {said}, but should agree [{folder}]")
    return steps[0] if steps else 0


def _partition(group: PartitionedGroup, whole: Mapping[str, Parameter], key: str) -> Tensor:
    """What this rank owns of one kind of tensor; zeros where no parameter lies."""
    flat = torch.zeros(group.partition_size)
    for name, fragment in group.fragments.items():
        own, there = fragment.in_partition, fragment.in_param
        part = whole[name].tensors[key][there.start : there.start + there.numel]
        flat[own.start : own.start + own.numel] = part
    return flat


def inner_dict(
    optimizer: torch.optim.Optimizer,
    held: Mapping[int, Mapping[str, object]],
    options: Sequence[Mapping[str, object]],
    folder: Path,
) -> StateDict:
    """A dict for the optimizer inside; options that it does not know are left out.

    Args:
        optimizer: the one inside; not changed.
        held: state by number of the parameter.
        options: by group.
        folder: for messages.

    Raises:
        ValueError: it does not fit.
    """
    own = optimizer.state_dict()
    known = [
        {**group, **{key: given[key] for key in given if key in group and key != "params"}}
        for group, given in zip(cast(list[StateDict], own["param_groups"]), options, strict=True)
    ]
    return fitting(optimizer, {**own, "state": dict(held), "param_groups": known}, str(folder))


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise ValueError(f"{file} does not exist, but should in a universal checkpoint")
    return file
