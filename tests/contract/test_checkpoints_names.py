"""Universal checkpoints of parameters whose names contain each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twinstep.contract.checkpoint.universal
from tests.helpers.partitions import BRAIN
from tests.helpers.sides import CLASSES, SIDES
from twinstep.parity.cases.fixed_inputs import moderate

pytestmark = pytest.mark.usefixtures("replay")
NAMES = ("a.weight", "aa.weight", "a.weight.a", "b.a.weight")
KINDS = ("fp32", "exp_avg", "exp_avg_sq")
READ = twinstep.contract.checkpoint.universal.read_group


def written(folder: Path) -> dict[str, dict[str, Tensor]]:
    """A universal checkpoint of parameters that differ in their values alone; and those."""
    values: dict[str, dict[str, Tensor]] = {}
    for at, name in enumerate(NAMES):
        place = folder / "zero" / name
        place.mkdir(parents=True)
        values[name] = {
            k: moderate(5, 10 * at + i, torch.float32).abs() for i, k in enumerate(KINDS)
        }
        for kind, tensor in values[name].items():
            torch.save({"param": tensor}, place / f"{kind}.pt")
        torch.save(3, place / "step.pt")
    torch.save({"param_groups": []}, folder / "zero" / "optimizer_state.pt")
    return values


def loaded(side: str, folder: Path) -> dict[str, dict[str, Tensor]]:
    """State of an optimizer by name once it has loaded them."""
    home = CLASSES[side]
    params = [nn.Parameter(torch.zeros(5, dtype=BRAIN)) for _ in NAMES]
    optimizer = home["BF16Optimizer"](
        home["FusedAdam"](params), param_names=dict(zip(params, NAMES, strict=True))
    )
    optimizer.load_state_dict([], checkpoint_folder=folder)
    whole = optimizer.get_full_hp_param
    return {name: {k: whole(name, None if k == "fp32" else k) for k in KINDS} for name in NAMES}


def same(found: dict[str, dict[str, Tensor]], wanted: dict[str, dict[str, Tensor]]) -> bool:
    return all(torch.equal(found[n][k], wanted[n][k]) for n in NAMES for k in KINDS)


@pytest.mark.parametrize("side", SIDES)
def test_a_name_inside_another_is_not_taken_for_it(side: str, tmp_path: Path) -> None:
    wanted = written(tmp_path)
    assert same(loaded(side, tmp_path), wanted)


def by_part_of_a_name(folder: Path, params: Mapping[str, Tensor]) -> Any:
    """H07: the last folder in whose name that of the parameter occurs."""
    places = sorted(place.name for place in (folder / "zero").iterdir())
    found = {name: [place for place in places if name in place][-1] for name in params}
    wholes, step = READ(folder, {place: params[name] for name, place in found.items()})
    return {name: wholes[place] for name, place in found.items()}, step


def test_a_name_found_inside_another_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H07 of docs/reference/bugs.md."""
    wanted = written(tmp_path)
    monkeypatch.setattr(twinstep.contract.checkpoint.universal, "read_group", by_part_of_a_name)
    assert not same(loaded("fast", tmp_path), wanted)
