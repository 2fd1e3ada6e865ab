"""Universal checkpoints: one folder per parameter, so that any number of ranks can load them.

<folder>/zero/optimizer_state.pt     hyper-parameters of the groups
<folder>/zero/<name>/fp32.pt         {"param": the whole weight}
<folder>/zero/<name>/<state>.pt      {"param": the whole state}
<folder>/zero/<name>/step.pt         completed steps, a number

Files are read with `weights_only=True`: they can run no code.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from fast.bf16_groups import PartitionedGroup
from fast.bf16_state import Loaded, fitting_inner
from fast.fragments import FragmentAddress
from fast.fused_adam import FusedAdam

# The one class that such files may name, and what is made instead.
KNOWN = [(FragmentAddress, "deepspeed.utils.tensor_fragment.fragment_address")]
BROKEN = (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, ValueError)


def read(groups: Sequence[PartitionedGroup], inside: FusedAdam, folder: Path) -> Loaded:
    """What this rank takes from a universal checkpoint; everything fits.

    Raises:
        ValueError: a file is missing or broken, a parameter has another number of elements, steps
            differ within a group, or groups do not match.
    """
    zero = folder / "zero"
    common = _read(zero / "optimizer_state.pt")
    options = common.get("param_groups", []) if isinstance(common, dict) else []
    if options and len(options) != len(groups):
        raise ValueError(
            f"optimizer_state.pt has {len(options)} groups, but should have {len(groups)} "
            f"[{folder}]"
        )
    flats = [_flats_of(group, zero) for group in groups]
    masters = [flat.pop("fp32") for flat in flats]
    state = {
        number: {"step": torch.tensor(_step_of(group, zero)), **flat}
        for number, (group, flat) in enumerate(zip(groups, flats, strict=True))
        if flat
    }
    own = inside.state_dict()
    known = [
        {**mine, **{key: theirs[key] for key in theirs if key in mine and key != "params"}}
        for mine, theirs in zip(own["param_groups"], options or [{} for _ in groups], strict=True)
    ]
    inner = fitting_inner(inside, {**own, "state": state, "param_groups": known})
    return Loaded(inner=inner, masters=masters, clip_grad=None)


def _flats_of(group: PartitionedGroup, zero: Path) -> dict[str, Tensor]:
    """This rank's partition of the weights (`fp32`) and of every state that is there."""
    device = group.master.device
    flats = {"fp32": torch.zeros(group.partition_size, device=device)}
    for name, size in zip(group.names, group.sizes, strict=True):
        if size and not (zero / name / "fp32.pt").is_file():
            raise ValueError(f"{zero / name / 'fp32.pt'} does not exist, but should [{name}]")
        files = sorted((zero / name).glob("*.pt")) if size else []
        for file in (file for file in files if file.stem != "step"):
            whole = _tensor_of(file, size)
            flat = flats.setdefault(file.stem, torch.zeros(group.partition_size, device=device))
            if name in group.fragments:
                at, own = group.fragments[name].in_param, group.fragments[name].in_partition
                part = whole[at.start : at.start + at.numel]
                flat[own.start : own.start + own.numel].copy_(part)
    return flats


def _tensor_of(file: Path, size: int) -> Tensor:
    held = _read(file)
    tensor = held.get("param") if isinstance(held, dict) else held
    if not isinstance(tensor, Tensor) or tensor.numel() != size:
        got = tensor.numel() if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(
            f"{file.name} of {file.parent.name} has {got} elements, but should have {size}"
        )
    return tensor.detach().reshape(-1)


def _step_of(group: PartitionedGroup, zero: Path) -> float:
    """Completed steps; ranks that own only padding read them, too."""
    steps = set()
    for name, size in zip(group.names, group.sizes, strict=True):
        file = zero / name / "step.pt"
        if size:
            steps.add(_number_of(file) if file.exists() else 0.0)
    if len(steps) > 1:
        said = ", ".join(map(str, sorted(steps)))
        raise ValueError(f"parameters of one group have steps {said}, but should agree [{zero}]")
    return max(steps, default=0.0)


def _number_of(file: Path) -> float:
    value = _read(file)
    one = isinstance(value, Tensor) and value.numel() == 1
    if one or (isinstance(value, int | float) and not isinstance(value, bool)):
        return float(cast(float, value))
    raise ValueError(f"{file.name} holds a {type(value).__name__}, but should hold a number")


def _read(file: Path) -> object:
    if not file.is_file():
        raise ValueError(f"{file} does not exist, but should in a universal checkpoint")
    try:
        with torch.serialization.safe_globals(list(KNOWN)):
            loaded: object = torch.load(file, map_location="cpu", weights_only=True)
    except BROKEN as error:
        (first, *_) = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"{file.name} should be a whole file of tensors and plain values, but: {first}"
        ) from error
    return loaded
