"""Universal checkpoints: one folder per parameter, so that any number of ranks can load them.

<folder>/zero/optimizer_state.pt     hyper-parameters of the groups
<folder>/zero/<name>/fp32.pt         {"param": the whole weight}
<folder>/zero/<name>/<state>.pt      {"param": the whole state}
<folder>/zero/<name>/step.pt         completed steps, a number
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from twinstep.contract.agreement import on_all_ranks
from twinstep.contract.moments import StateDict, whole_steps
from twinstep.contract.tensors import check_in_memory
from twinstep.fast.bf16_groups import PartitionedGroup
from twinstep.fast.bf16_state import Loaded
from twinstep.fast.checkpoint import read_checkpoint, read_number
from twinstep.fast.fitting import state_inside

Options = Mapping[str, object]
Whole = dict[str, Tensor]


def read(
    groups: Sequence[PartitionedGroup],
    inside: torch.optim.Optimizer,
    folder: Path,
    *,
    states: bool = True,
) -> Loaded:
    """What this rank takes from a universal checkpoint; everything fits.

    Args:
        groups: as they are now.
        inside: the optimizer inside.
        folder: of the checkpoint.
        states: the state of the optimizer inside is asked for, too.

    Raises:
        ValueError: a file is missing or broken, a parameter has another number of elements, states
            or steps differ within a group, or groups do not match; here or on another rank.
    """
    return on_all_ranks(
        lambda: _own(groups, inside, folder, states),
        [group.process_group for group in groups],
        groups[0].master.device,
    )


def _own(
    groups: Sequence[PartitionedGroup], inside: torch.optim.Optimizer, folder: Path, states: bool
) -> Loaded:
    options = saved_options(folder, len(groups))
    masters = []
    held: dict[int, StateDict] = {}
    for number, group in enumerate(groups):
        wholes, step = read_group(folder, dict(zip(group.names, group.params, strict=True)))
        kinds = next(iter(wholes.values()), {"fp32": torch.empty(0)})
        flats = {kind: _own_part(group, wholes, kind) for kind in kinds}
        masters.append(flats.pop("fp32"))
        if flats:
            # Ranks that own only padding have the step of the others.
            held[number] = {"step": torch.tensor(float(step)), **flats}
    inner = dict_inside(inside, held, options, folder) if states else None
    return Loaded(inner=inner, masters=masters, clip_grad=None)


def saved_options(folder: Path, count: int) -> list[Options]:
    """Return the hyper-parameters of each group; empty ones where the checkpoint has none.

    Raises:
        ValueError: there are some, but not for each group, or their file is missing or broken.
    """
    file = folder / "zero" / "optimizer_state.pt"
    rows = read_checkpoint(_existing(file)).get("param_groups") or list(repeat({}, count))
    if not isinstance(rows, list) or any(not isinstance(row, dict) for row in rows):
        raise ValueError(f"{file.name} should have param_groups in a list of dicts, but has not")
    if len(rows) != count:
        raise ValueError(f"{file.name} has {len(rows)} groups, but should have {count} [{folder}]")
    return rows


def read_group(folder: Path, params: Mapping[str, Tensor]) -> tuple[dict[str, Whole], int]:
    """Read the parameters of one group by name; empty ones have no folder.

    Returns:
        By name, the weight (`fp32`) and every state, whole, 1-D and fp32; and completed steps.

    Raises:
        ValueError: a file is missing or broken, has another number of elements, or parameters have
            different states or steps.
    """
    wholes: dict[str, Whole] = {}
    steps: dict[str, int] = {}
    for name, param in params.items():
        if param.numel() == 0:
            continue
        place = folder / "zero" / name
        _existing(place / "fp32.pt")
        files = [file for file in place.glob("*.pt") if file.stem != "step"]
        wholes[name] = {file.stem: _tensor_of(file, param) for file in sorted(files)}
        count = read_number(place / "step.pt") if (place / "step.pt").exists() else 0.0
        steps[name] = whole_steps(count, str(place))
    if len(set(steps.values())) > 1:
        said = ", ".join(map(str, sorted(set(steps.values()))))
        raise ValueError(f"parameters of one group have steps {said}, but should agree [{folder}]")
    if len({tuple(whole) for whole in wholes.values()}) > 1:
        said = "; ".join(f"{name} has {', '.join(whole)}" for name, whole in wholes.items())
        raise ValueError(f"{said}, but all should have the same [{folder}]")
    return wholes, max(steps.values(), default=0)


def _tensor_of(file: Path, param: Tensor) -> Tensor:
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


def _own_part(group: PartitionedGroup, wholes: Mapping[str, Whole], kind: str) -> Tensor:
    """This rank's partition; zeros where no parameter lies."""
    flat = torch.zeros(group.partition_size)
    for name, fragment in group.fragments.items():
        at, own = fragment.in_param, fragment.in_partition
        flat.narrow(0, own.start, own.numel).copy_(wholes[name][kind].narrow(0, at.start, at.numel))
    return flat


def dict_inside(
    inside: torch.optim.Optimizer,
    held: Mapping[int, StateDict],
    options: Sequence[Options],
    folder: Path,
) -> StateDict:
    """Return a dict for the optimizer inside, without options that it does not know.

    Args:
        inside: not changed.
        held: state by number of the parameter.
        options: of each group.
        folder: for messages.

    Raises:
        ValueError: it does not fit.
    """
    own = inside.state_dict()
    rows = cast("list[StateDict]", own["param_groups"])
    for row, given in zip(rows, options, strict=True):
        row.update({key: given[key] for key in given if key in row and key != "params"})
    return state_inside(inside, {**own, "state": dict(held)}, str(folder))


def _existing(file: Path) -> Path:
    if file.is_file():
        return file
    raise ValueError(f"{file} does not exist, but should in a universal checkpoint")
