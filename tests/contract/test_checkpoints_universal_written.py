"""Universal checkpoints of ZeroOptimizer: loaded by every class, and whole or not there."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.ranks import on_ranks
from tests.helpers.sides import SIDES
from tests.helpers.zero_built import BRAIN, SIDE, Group, built, place, seen, trained
from twinstep.contract.checkpoint import read_checkpoint, save_universal_checkpoint, universal_write
from twinstep.parity.cases.fixed_inputs import bits
from twinstep.parity.ranks.errors import RanksFailed
from twinstep.reference.optimizers.bf16 import BF16Optimizer
from twinstep.reference.optimizers.fused_adam import FusedAdam

pytestmark = pytest.mark.usefixtures("replay")
SIZES = (4, 0, 3, 6)
OPTIONS: dict[str, Any] = {"inside": "FusedAdam", "dtype": BRAIN, "split": 2}


def written(side: str, world: int, folder: Path, **options: Any) -> None:
    """A checkpoint after two steps."""

    def run(group: Group) -> None:
        params, optimizer = built(group, SIZES, **{**OPTIONS, **options})
        trained(params, optimizer, range(2))
        save_universal_checkpoint(optimizer, folder)

    token = SIDE.set(side)
    on_ranks(world, run)
    SIDE.reset(token)


def ended(world: int, folder: Path | None) -> list[list[object]]:
    """Observations after four steps, the first two of which are in the folder if there is one."""

    def run(group: Group) -> list[object]:
        params, optimizer = built(group, SIZES, **OPTIONS)
        if folder is not None:
            optimizer.load_state_dict([], checkpoint_folder=folder)
        trained(params, optimizer, range(0 if folder is None else 2, 4))
        return seen(params, optimizer)

    return on_ranks(world, run)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (4, 2), (1, 4)])
def test_a_run_goes_on_with_its_bits_on_another_number_of_ranks(
    side: str, before: int, after: int, tmp_path: Path
) -> None:
    written(side, before, tmp_path / "u", round_robin_gradients=True)
    assert ended(after, tmp_path / "u") == ended(after, None)
    assert [file.name for file in tmp_path.iterdir()] == ["u"]
    names = sorted(file.name for file in (tmp_path / "u" / "zero" / "p2").iterdir())
    assert names == ["exp_avg.pt", "exp_avg_sq.pt", "fp32.pt", "step.pt"]
    assert not (tmp_path / "u" / "zero" / "p1").exists()


def test_another_class_takes_it_up(tmp_path: Path) -> None:
    written("fast", 2, tmp_path / "u", split=None)
    params = [torch.nn.Parameter(torch.zeros(size, dtype=BRAIN)) for size in SIZES]
    names = {param: f"p{at}" for at, param in enumerate(params)}
    other = BF16Optimizer(FusedAdam(params, lr=9.0), param_names=names)
    other.load_state_dict([], checkpoint_folder=tmp_path / "u")
    assert other.param_groups[0]["lr"] == 0.1
    for param, name in names.items():
        if param.numel():
            saved: Any = read_checkpoint(tmp_path / "u" / "zero" / name / "fp32.pt")["param"]
            assert bits(param.detach()) == bits(saved.to(BRAIN))
            assert bits(other.get_full_hp_param(name)) == bits(saved)
    save_universal_checkpoint(other, tmp_path / "again")
    first, second = tmp_path / "u" / "zero", tmp_path / "again" / "zero"
    files = sorted(file.relative_to(first) for file in first.rglob("p*/*.pt"))
    assert len(files) == 12
    for file in files:
        one, two = (torch.load(at / file, weights_only=True) for at in (first, second))
        pair = (one, two) if isinstance(one, torch.Tensor) else (one["param"], two["param"])
        assert bits(pair[0]) == bits(pair[1])


def test_experts_and_parts_of_parameters_are_refused(tmp_path: Path) -> None:
    unit = SimpleNamespace(
        get_model_parallel_group=lambda: None,
        get_model_parallel_rank=lambda: 0,
        get_model_parallel_world_size=lambda: 1,
    )
    _, optimizer = built(None, SIZES, **OPTIONS)
    optimizer.mpu = unit
    with pytest.raises(ValueError, match="a universal checkpoint has whole ones"):
        save_universal_checkpoint(optimizer, tmp_path / "u")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("world", [1, 2])
def test_no_save_replaces_another(world: int, tmp_path: Path) -> None:
    written("reference", world, tmp_path / "u")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.pt")}
    with pytest.raises((ValueError, RanksFailed), match="u is there, but should be new"):
        written("reference", world, tmp_path / "u", inside="SGD")
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.pt")} == before


def test_a_save_that_fails_on_the_first_rank_fails_on_all_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []
    lock = threading.Lock()
    write = universal_write._write

    def full(path: Path, contents: object) -> None:
        with lock:
            calls.append(path)
        if len(calls) == 5:
            raise OSError("no space left")
        write(path, contents)

    monkeypatch.setattr(universal_write, "_write", full)

    def run(group: Group) -> str:
        params, optimizer = built(group, SIZES, **OPTIONS)
        trained(params, optimizer, range(2))
        before = seen(params, optimizer)
        with pytest.raises((OSError, ValueError)) as caught:
            save_universal_checkpoint(optimizer, tmp_path / "u")
        assert seen(params, optimizer) == before
        return f"{place(group)}: {caught.value}"

    own, other = on_ranks(2, run)
    assert own == "0: no space left"
    assert "another rank (0) cannot" in other
    assert len(calls) == 5
    assert list(tmp_path.iterdir()) == []
