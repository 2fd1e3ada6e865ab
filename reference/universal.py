"""Universal checkpoints: one folder per parameter, so that any number of ranks can load them.

<folder>/zero/optimizer_state.pt     hyper-parameters of the groups
<folder>/zero/<name>/fp32.pt         {"param": the whole weight}
<folder>/zero/<name>/<state>.pt      {"param": the whole state}
<folder>/zero/<name>/step.pt         completed steps, a number
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from reference.bf16_groups import PartitionedGroup
from reference.checkpoint import read_checkpoint, read_number
from reference.restore import StateDict


@dataclass(frozen=True, kw_only=True)
class Universal:
    """What a checkpoint holds of this rank's groups; everything fits.

    Attributes:
        masters: one per group, as long as this rank's.
        states: by group, a flat tensor per state, as long as the master.
        steps: by group, completed steps; 0 where the checkpoint does not say.
        options: by group, hyper-parameters; empty where the checkpoint has none.
    """

    masters: list[Tensor]
    states: list[dict[str, Tensor]]
    steps: list[float]
    options: list[Mapping[str, object]]


def read(groups: Sequence[PartitionedGroup], folder: Path) -> Universal:
    """Read what this rank needs.

    Raises:
        ValueError: a file is missing or broken, a parameter has another number of elements, steps
            differ within a group, or groups do not match.
    """
    common = _existing(folder / "zero" / "optimizer_state.pt")
    saved = read_checkpoint(common).get("param_groups", [])
    options: list[Mapping[str, object]] = [
        {key: value for key, value in group.items() if key != "params"}
        for group in cast(Sequence[StateDict], saved)
    ]
    if options and len(options) != len(groups):
        raise ValueError(
            f"{common.name} has {len(options)} groups, but should have {len(groups)} [{folder}]"
        )
    masters, states, steps = [], [], []
    for group in groups:
        flats, step = _read_group(group, folder / "zero")
        masters.append(flats.pop("fp32"))
        states.append(flats)
        steps.append(step)
    options = options or [{} for _ in groups]
    return Universal(masters=masters, states=states, steps=steps, options=options)


def _read_group(group: PartitionedGroup, folder: Path) -> tuple[dict[str, Tensor], float]:
    """Flat tensors by state, and completed steps."""
    flats = {"fp32": torch.zeros_like(group.master, requires_grad=False)}
    steps = set()
    for name, param in zip(group.names, group.params, strict=True):
        if not param.numel():
            continue
        # Steps are read for every parameter: a rank that owns only padding needs them too.
        file = folder / name / "step.pt"
        steps.add(read_number(file) if file.exists() else 0.0)
        for key, whole in _states(folder / name, param):
            flat = flats.setdefault(key, torch.zeros(group.partition_size))
            if name in group.fragments:
                fragment = group.fragments[name]
                own, there = fragment.in_partition, fragment.in_param
                part = whole[there.start : there.start + there.numel]
                flat[own.start : own.start + own.numel] = part
    if len(steps) > 1:
        said = ", ".join(str(step) for step in sorted(steps))
        raise ValueError(f"parameters of one group have steps {said}, but should agree [{folder}]")
    return flats, steps.pop() if steps else 0.0


def _states(folder: Path, param: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The flattened tensors of a parameter by state, `fp32` among them."""
    _existing(folder / "fp32.pt")
    for file in sorted(folder.glob("*.pt")):
        if file.stem == "step":
            continue
        tensor = read_checkpoint(file).get("param")
        if not isinstance(tensor, Tensor) or tensor.numel() != param.numel():
            got = tensor.numel() if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(
                f"{file.name} of {folder.name} has {got} elements, but should have {param.numel()}"
            )
        yield file.stem, tensor.detach().reshape(-1)


def enter(
    groups: Sequence[PartitionedGroup],
    optimizer: torch.optim.Optimizer,
    found: Universal,
    load_optimizer_states: bool,
) -> None:
    """Write masters and, unless they are left out, states, steps and hyper-parameters."""
    # States first: an optimizer that refuses them has changed nothing.
    if load_optimizer_states:
        _enter_states(optimizer, found)
    for group, master in zip(groups, found.masters, strict=True):
        group.master.detach().copy_(master)


def _enter_states(optimizer: torch.optim.Optimizer, found: Universal) -> None:
    own = optimizer.state_dict()
    state: dict[int, dict[str, object]] = {}
    for number, flats in enumerate(found.states):
        if flats:
            step = torch.tensor(found.steps[number])
            state[number] = {"step": step, **flats}
    known = [
        {**group, **{key: value for key, value in options.items() if key in group}}
        for group, options in zip(own["param_groups"], found.options, strict=True)
    ]
    optimizer.load_state_dict({**own, "state": state, "param_groups": known})


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise ValueError(f"{file} does not exist, but should in a universal checkpoint")
    return file
