"""Constructors, loads and files over ranks: what one rank refuses, no rank does."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.mesh import Mesh, Training, on_mesh
from tests.helpers.partitions import built, seen, trained
from tests.helpers.sides import CLASSES, SIDES
from twinstep.contract.agreement import on_all_ranks
from twinstep.contract.checkpoint import read_checkpoint, write_checkpoint
from twinstep.contract.parallel import groups_given

pytestmark = pytest.mark.usefixtures("replay")
BOTH = pytest.mark.parametrize("side", SIDES)
FP16 = pytest.mark.parametrize("kind", ["FP16Optimizer", "FP16UnfusedOptimizer"])
CPU = torch.device("cpu")
OTHERS = "another rank cannot, and names the reason: all ranks should, or none"


def sentence(run: Callable[[], object]) -> str:
    """The error of a call, without the number of another rank."""
    try:
        run()
    except Exception as error:
        return re.sub(r"another rank \(\d+\)", "another rank", f"{type(error).__name__}: {error}")
    return "none"


@pytest.mark.parametrize("wrong", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_a_refusal_anywhere_is_everybodys(wrong: tuple[int, int]) -> None:
    """Every group is asked once, and any error counts."""

    def run(mesh: Mesh) -> str:
        def read() -> int:
            if mesh.place == wrong:
                raise LookupError("not here")
            return 3

        groups = [mesh.row, None, mesh.column, mesh.row]
        said = sentence(lambda: on_all_ranks(read, groups, CPU))
        assert len(mesh.calls) == 2
        return said

    said = on_mesh(2, 2, run)
    assert sorted(said) == ["LookupError: not here", *[f"ValueError: {OTHERS}"] * 3]


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [
        ([3.0, 3.0, 3.0], "none"),
        ([None, 3.0, 3.0], "none"),
        ([None, None, None], "none"),
        ([3.0, 4.0, None], "n is 3 on one rank and 4 on another, but should be the same on all"),
        ([-1.5, -1.5, 0.0], "n is -1.5 on one rank and 0 on another, but should be"),
    ],
)
def test_numbers_that_should_be_alike_are_compared(
    numbers: list[float | None], wanted: str
) -> None:
    def run(mesh: Mesh) -> str:
        own = numbers[mesh.place[1]]
        same: Mapping[str, Callable[[int], float | None]] = {"m": float, "n": lambda _: own}
        return sentence(lambda: on_all_ranks(lambda: 0, [mesh.row, mesh.column], CPU, same=same))

    for said in on_mesh(3, 1, run):
        assert wanted in said


def test_without_groups_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", None)
    assert on_all_ranks(lambda: 5, [None], CPU, same={"n": float}) == 5


def test_groups_come_in_one_order_whatever_the_order_of_names() -> None:
    a, b, c, d = "abcd"
    given = {"expert_groups": {"y": b, "x": a}, "expert_data_groups": {"z": d, "x": c}}
    found: list[Any] = list(groups_given({**given, "dp_process_group": "first"}))
    assert found == ["first", a, b, c, d]


@BOTH
@FP16
@pytest.mark.parametrize("wrong", [(0, 0), (1, 1)])
def test_a_constructor_that_refuses_on_one_rank_refuses_on_all(
    side: str, kind: str, wrong: tuple[int, int]
) -> None:
    def run(mesh: Mesh) -> str:
        options: dict[str, Any] = {"norm_type": -1.0} if mesh.place == wrong else {}
        return sentence(lambda: Training(side, mesh, kind=kind, **options))

    said = on_mesh(2, 2, run)
    assert said.count(f"ValueError: {OTHERS}") == 3
    assert sum("norm_type=-1.0, but should be" in one for one in said) == 1


@BOTH
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grad_acc_dtype": torch.float16}, "grad_acc_dtype=torch.float16, but should be"),
        ({"allgather_bucket_size": 0}, "allgather_bucket_size=0, but should be"),
        ({"has_moe_layers": True}, "no group is marked moe"),
        ({"sizes": (4, 0, 5, 3)}, "names, sizes and dtypes of its parameters is"),
        ({"sizes": (4, 0, 3, 5, 1)}, "names, sizes and dtypes of its parameters is"),
        ({"name": "q"}, "names, sizes and dtypes of its parameters is"),
    ],
)
def test_bf16_is_constructed_by_all_or_by_none(
    side: str, options: dict[str, Any], message: str
) -> None:
    """Parameters in another order would be gathered into each other's places."""

    def run(mesh: Mesh) -> str:
        given = options if mesh.place == (0, 1) else {}
        return sentence(lambda: built(side, dp_process_group=mesh.column, mpu=mesh, **given))

    said = on_mesh(2, 2, run)
    count = 2 if "names" in message else 1
    assert sum(message in one for one in said) == count
    assert said.count(f"ValueError: {OTHERS}") == 4 - count


SPOILED: dict[str, tuple[Callable[[dict[str, Any]], object], str, str]] = {
    "clip": (lambda s: s.update(clip_grad="much"), "clip_grad='much'", OTHERS),
    "scale": (lambda s: s.update(cur_scale=-1.0), "loss scale is -1.0", OTHERS),
    "inner": (lambda s: s.update(optimizer_state_dict=3), "should be the state dict", OTHERS),
    "other clip": (lambda s: s.update(clip_grad=9.0), "clip_grad is 0.6", "clip_grad is 0.6"),
    "other scale": (lambda s: s.update(cur_scale=8.0), "loss scale is 8", "loss scale is 8"),
    "other step": (lambda s: _step_on(s), "step is 1 on one rank and 6", "step is 1 on one"),
}


def _step_on(state: dict[str, Any]) -> None:
    inner = state["base_optimizer_state" if "ds_version" in state else "optimizer_state_dict"]
    for held in inner["state"].values():
        held["step"] = held["step"] + 5


@BOTH
@FP16
def test_fp16_is_loaded_by_all_or_by_none(side: str, kind: str) -> None:
    """A row holds one model: a rank that keeps its own state would step another one."""

    def run(mesh: Mesh) -> list[str]:
        training, source = (Training(side, mesh, kind=kind) for _ in range(2))
        source.fill(1)
        source.optimizer.step()
        before, said = training.seen(), []
        for spoil, *_ in SPOILED.values():
            state = source.optimizer.state_dict()
            if mesh.place == (1, 0):
                spoil(state)
            said.append(sentence(partial(training.optimizer.load_state_dict, state)))
        assert training.seen() == before
        training.optimizer.load_state_dict(source.optimizer.state_dict())
        assert training.seen() != before
        return said

    ranks = on_mesh(2, 2, run)
    wrong = 1  # in the order of rows
    for number, (_, own, others) in enumerate(SPOILED.values()):
        for rank, said in enumerate(ranks):
            assert (own if rank == wrong else others) in said[number], (number, rank)


@BOTH
def test_bf16_entries_of_different_steps_are_refused_by_all(side: str) -> None:
    """Files that a save has replaced on one rank only."""

    def run(mesh: Mesh) -> tuple[str, bool]:
        params, optimizer = built(side, dp_process_group=mesh.column, mpu=mesh)
        trained(params, optimizer, range(1))
        entry = optimizer.state_dict()
        before = seen(params, optimizer)
        own: dict[str, Any] = optimizer.state_dict()
        if mesh.place == (1, 1):
            _step_on(own)
        entries = [own, own]
        said = sentence(lambda: optimizer.load_state_dict(entries, load_from_fp32_weights=True))
        kept = seen(params, optimizer) == before
        optimizer.load_state_dict([entry, entry], load_from_fp32_weights=True)
        return said, kept

    wanted = "ValueError: step is 1 on one rank and 6 on another, but should be the same on all"
    assert on_mesh(2, 2, run) == [(wanted, True)] * 4


@BOTH
@pytest.mark.parametrize("world", [1, 2, 3])
def test_entries_of_other_ranks_are_refused(side: str, world: int) -> None:
    """Two halves of one parameter look alike; only the rank tells them apart."""

    def saving(mesh: Mesh) -> Any:
        return built(side, (8, 0, 8), dp_process_group=mesh.column)[1].state_dict()

    swapped = on_mesh(2, 1, saving)[::-1]

    def loading(mesh: Mesh, entries: list[Any]) -> str:
        _, optimizer = built(side, (8, 0, 8), dp_process_group=mesh.column)
        return sentence(partial(optimizer.load_state_dict, entries, load_from_fp32_weights=True))

    wanted = r"ValueError: partition_rank=\[1, 1\], but should be \[0, 0\] \[entry 0, .*"
    assert re.match(wanted, on_mesh(world, 1, partial(loading, entries=swapped))[0])
    assert on_mesh(2, 1, partial(loading, entries=swapped[::-1])) == ["none", "none"]


@BOTH
@pytest.mark.parametrize("split", [False, True])
def test_every_rank_loads_its_own_experts(side: str, split: bool) -> None:
    """Shared parameters are split over a column, experts over nobody or over a row."""

    def marks(params: list[nn.Parameter]) -> None:
        for param in params[2:]:
            param.allreduce, param.group_name = False, "e"  # type: ignore[attr-defined]

    def made(mesh: Mesh) -> Any:
        options: dict[str, Any] = {"dp_process_group": mesh.column, "has_moe_layers": True}
        if split:
            options["expert_data_groups"] = {"e": mesh.row}
        return built(side, marks=marks, second={"moe": True, "name": "e"}, **options)

    def run(mesh: Mesh) -> Any:
        params, optimizer = made(mesh)
        for step in range(2):
            for place, param in enumerate(params):
                # Experts of another row are other experts.
                value = 1.0 + step + place + (10.0 * mesh.place[1] if place > 1 else 0.0)
                param.grad = torch.full_like(param, value)
            optimizer.update_hp_grads(clear_lp_grads=True)
            optimizer.step()
        return optimizer.state_dict(), seen(params, optimizer)[:-2]

    rows, columns = 3, 2
    saved = on_mesh(rows, columns, run)

    def loading(mesh: Mesh) -> Any:
        params, optimizer = made(mesh)
        column, row = mesh.place
        entries = [saved[other * columns + column][0] for other in range(rows)]
        optimizer.load_state_dict(entries, load_from_fp32_weights=True)
        assert seen(params, optimizer)[:-2] == saved[row * columns + column][1]
        return True

    assert on_mesh(rows, columns, loading) == [True] * (rows * columns)
    experts_of_ranks = [str(entry["single_partition_of_fp32_groups"][1]) for entry, _ in saved]
    assert len(set(experts_of_ranks)) == (rows * columns if split else rows)


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def foreign(path: Path) -> None:
    torch.save([1, 2], path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove, "FileNotFoundError: .*rank1.pt"),
        (cut, "ValueError: rank1.pt should be a whole checkpoint"),
        (foreign, "ValueError: rank1.pt holds a list"),
    ],
)
def test_a_file_that_one_rank_cannot_read_is_read_by_none(
    spoil: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    for rank in range(3):
        write_checkpoint(tmp_path / f"rank{rank}.pt", {"rank": rank})

    def run(mesh: Mesh) -> str:
        rank = mesh.place[1]
        path = tmp_path / f"rank{rank}.pt"
        assert read_checkpoint(path, [mesh.column, mesh.row]) == {"rank": rank}
        if rank == 1:
            spoil(path)
        return sentence(lambda: read_checkpoint(path, [mesh.column, mesh.row]))

    first, own, last = on_mesh(3, 1, run)
    assert first == last == f"ValueError: {OTHERS}"
    assert re.match(message, own)


@BOTH
@pytest.mark.parametrize("kind", ["BF16Optimizer", "ZeroOptimizer"])
def test_without_a_group_masters_are_split_over_the_job(side: str, kind: str) -> None:
    """As DeepSpeed's classes; each rank of several would train alone, without a word."""

    def make(**given: Any) -> Any:
        param = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        inside = CLASSES[side]["FusedAdam"]([param])
        return CLASSES[side][kind](inside, param_names={param: "p"}, **given)

    def run(mesh: Mesh) -> list[bool]:
        splits = [(make(), dist.group.WORLD), (make(mpu=mesh), mesh.column)]
        return [optimizer.groups[0].process_group is group for optimizer, group in splits]

    assert on_mesh(2, 2, run) == [[True, True]] * 4
    assert make().groups[0].process_group is None


@BOTH
@pytest.mark.parametrize("kind", ["BF16Optimizer", "ZeroOptimizer"])
def test_ranks_that_nothing_connects_are_refused(
    side: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    param = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    inside = CLASSES[side]["FusedAdam"]([param])
    with pytest.raises(RuntimeError, match="is not initialised in a job of 2 ranks, but should be"):
        CLASSES[side][kind](inside, param_names={param: "p"})
