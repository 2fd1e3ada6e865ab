"""State dicts of ZeroOptimizer: by parameter, for any number of ranks, and whole or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.ranks import on_ranks
from tests.helpers.sides import CLASSES, SIDES
from tests.helpers.zero_built import BRAIN, HALF, Group, built, fill, place, seen, trained
from twinstep.contract.checkpoint import read_checkpoint, write_checkpoint
from twinstep.reference.optimizers.bf16 import BF16Optimizer
from twinstep.reference.optimizers.fused_adam import FusedAdam

SIZES = (4, 0, 3, 6)
Entry = dict[str, Any]


def saved_by(world: int, steps: int = 2, **options: Any) -> list[Entry]:
    """Entries of all ranks."""

    def run(group: Group) -> Entry:
        params, optimizer = built(group, SIZES, **options)
        trained(params, optimizer, range(steps))
        return optimizer.state_dict()

    return on_ranks(world, run)


def resumed(world: int, saved: list[Any], steps: range, **options: Any) -> list[list[object]]:
    """Observations of every rank after loading and further steps."""

    def run(group: Group) -> list[object]:
        params, optimizer = built(group, SIZES, **options)
        optimizer.load_state_dict(saved, load_from_fp32_weights=True)
        trained(params, optimizer, steps)
        return seen(params, optimizer)

    return on_ranks(world, run)


@pytest.mark.parametrize("inside", ["FusedAdam", "Adam", "momentum", "SGD"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 4), (4, 2)])
def test_any_inner_optimizer_goes_on_with_its_bits(inside: str, before: int, after: int) -> None:
    """Edges CK-3 and CK-4: counters in state, moments by name, round robin on one side alone."""
    options: dict[str, Any] = {"inside": inside, "split": 2}
    saved = saved_by(before, **options, round_robin_gradients=True)
    found = resumed(after, saved[::-1], range(2, 4), **options)
    wanted = resumed(1, saved_by(1, 4, **options), range(0), **options)
    assert [row[:-4] for row in found] == [wanted[0][:-4]] * after


def test_padding_is_saved_by_no_rank() -> None:
    """Edges CK-5 and Z-11: one element over four ranks, three of which have padding alone."""

    def run(group: Group) -> Entry:
        params, optimizer = built(group, (1,), inside="FusedAdam")
        trained(params, optimizer, range(2))
        return optimizer.state_dict()

    saved = on_ranks(4, run)
    assert [[row["numel"] for row in entry["fragments"]] for entry in saved] == [[1], [0], [0], [0]]
    (row,) = saved[0]["fragments"]
    assert (row["name"], row["start"], row["numel"], row["whole"]) == ("p0", 0, 1, 1)

    def load(group: Group) -> list[Any]:
        _, optimizer = built(group, (1,), inside="FusedAdam")
        optimizer.load_state_dict([saved[0], None], load_from_fp32_weights=True)
        steps = [int(state["step"]) for state in optimizer.state.values()]
        return [optimizer.get_full_hp_param("p0").tolist(), steps]

    assert on_ranks(3, load) == [[row["fp32"].tolist(), [2]]] * 3


def theirs(rank: int) -> Entry:
    """DeepSpeed's shard of a rank of two that saved one element."""
    part = torch.full((1 - rank,), 0.5)
    return {
        "zero_stage": 1,
        "ds_version": "0.19.8",
        "loss_scaler": SimpleNamespace(cur_scale=1.0, cur_iter=2, dynamic=False),
        "partition_count": [2],
        "single_partition_of_fp32_groups": [part],
        "base_optimizer_state": [{"step": 2, "exp_avg": part, "exp_avg_sq": part}],
    }


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_a_rank_with_padding_alone_restores_its_state_from_its_own_entry(whose: str) -> None:
    """A state is read by all ranks together: those without it would leave the others waiting."""

    def save(group: Group) -> Entry:
        params, optimizer = built(group, (1,), inside="FusedAdam")
        trained(params, optimizer, range(2))
        return optimizer.state_dict()

    saved = on_ranks(2, save) if whose == "ours" else [theirs(0), theirs(1)]

    def load(group: Group) -> tuple[list[int], list[float]]:
        _, optimizer = built(group, (1,), inside="FusedAdam")
        own: list[Any] = [None, None]
        own[place(group)] = saved[place(group)]
        optimizer.load_state_dict(own, load_from_fp32_weights=True)
        steps = [int(state["step"]) for state in optimizer.state.values()]
        return steps, optimizer.get_full_hp_param("p0", "exp_avg").tolist()

    first, second = on_ranks(2, load)
    assert first == second
    assert first[0] == [2]


def test_entries_that_a_rank_does_not_need_may_be_missing() -> None:
    saved = saved_by(2, inside="FusedAdam")

    def run(group: Group) -> list[object]:
        params, optimizer = built(group, SIZES, inside="FusedAdam")
        own: list[Any] = [None, None]
        own[place(group)] = saved[place(group)]
        optimizer.load_state_dict(own, load_from_fp32_weights=True)
        return seen(params, optimizer)

    assert on_ranks(2, run) == resumed(2, saved, range(0), inside="FusedAdam")


def test_files_hold_plain_values_and_the_scale(tmp_path: Path) -> None:
    """Edge CK-2: nothing in them is code; the scale goes on, counters and all."""
    moving = {"init_scale": 64.0, "scale_window": 2, "delayed_shift": 2}
    options: dict[str, Any] = {"dynamic_loss_scale": True, "dynamic_loss_args": moving}
    params, optimizer = built(None, SIZES, clip_grad=0.5, **options)
    fill(params, float("inf"))
    optimizer.step()
    write_checkpoint(tmp_path / "a.pt", optimizer.state_dict())
    _, other = built(None, SIZES, **options)
    other.load_state_dict([read_checkpoint(tmp_path / "a.pt")])
    assert other.loss_scaler.state == optimizer.loss_scaler.state
    assert other.clip_grad == 0.5


def test_masters_come_from_the_model_unless_they_are_asked_for() -> None:
    saved = saved_by(1)
    params, optimizer = built(None, SIZES)
    with torch.no_grad():
        params[0].fill_(5.0)
    optimizer.load_state_dict(saved)
    assert optimizer.get_full_hp_param("p0").tolist() == [5.0] * 4
    optimizer.load_state_dict(saved, load_from_fp32_weights=True)
    assert params[0].tolist() != [5.0] * 4


def changed(entry: Entry, **values: Any) -> Entry:
    return {**entry, **values}


def rows(entry: Entry, change: Callable[[Entry], Entry], only: int = 0) -> Entry:
    """An entry with one row changed."""
    fragments = list(entry["fragments"])
    fragments[only] = change(fragments[only])
    return {**entry, "fragments": fragments}


def cut(row: Entry) -> Entry:
    state = {key: value[:-1] for key, value in row["state"].items()}
    return {**row, "numel": row["numel"] - 1, "fp32": row["fp32"][:-1], "state": state}


WRONG: dict[str, tuple[Callable[[list[Entry]], Any], str]] = {
    "no list": (lambda e: "entries", "states should be a list with one entry per rank"),
    "nothing": (lambda e: [None, None], "states should be a list with one entry per rank"),
    "no dict": (lambda e: [1], "state is a int, but should be a dict"),
    "foreign": (
        lambda e: [{"zero_stage": 1, "single_partition_of_fp32_groups": []}],
        "state has no format, loss_scaler, param_groups, fragments, but should; it seems to be th",
    ),
    "format": (lambda e: [changed(e[0], format="x")], "format='x', but should be 'twinstep ZeRO"),
    "one rank": (lambda e: e[:1], "elements of p3 from 0 to 5, but should have all"),
    "twice": (lambda e: [e[0], *e], "p0 has element 0 twice, but entries should be of the ranks"),
    "clip": (lambda e: [e[0], changed(e[1], clip_grad=9.0)], "entries have different clip_grad"),
    "scaler": (lambda e: [changed(x, loss_scaler=3) for x in e], "loss_scaler should be a dict"),
    "scale": (
        lambda e: [changed(x, loss_scaler={**x["loss_scaler"], "cur_scale": -1.0}) for x in e],
        "loss scale is -1.0, but should be positive",
    ),
    "rows": (lambda e: [changed(e[0], fragments=3), e[1]], "fragments should be a list of rows"),
    "column": (
        lambda e: [rows(e[0], lambda row: {"name": "p0"}), e[1]],
        "state has no start, numel, whole, expert, fp32, state, counters, but should",
    ),
    "stranger": (
        lambda e: [rows(e[0], lambda row: {**row, "name": "p9"}), e[1]],
        "entries have p9, but there is no such parameter",
    ),
    "longer": (
        lambda e: [rows(e[0], lambda row: {**row, "whole": 5}), e[1]],
        "p0 has 5 elements, but should have 4",
    ),
    "place": (
        lambda e: [rows(e[0], lambda row: {**row, "start": -1}), e[1]],
        "start=-1, but should be a whole number",
    ),
    "gap": (lambda e: [rows(e[0], cut), e[1]], "have 3 elements of p0 from 0 to 3, but should"),
    "shape": (
        lambda e: [rows(e[0], lambda row: {**row, "fp32": torch.zeros(7)}), e[1]],
        r"fp32 of p0 has shape \(7,\), but should have \(4,\)",
    ),
    "dtype": (
        lambda e: [rows(e[0], lambda row: {**row, "fp32": row["fp32"].half()}), e[1]],
        "fp32 of p0 should be torch.float32",
    ),
    "moment": (
        lambda e: [rows(e[0], lambda row: {**row, "state": {}}), e[1]],
        "parameters of one group have different states",
    ),
    "counter": (
        lambda e: [rows(e[0], lambda row: {**row, "counters": {"step": torch.tensor(7)}}), e[1]],
        "step is 2, 7 in one group, but should be of one save",
    ),
    "options": (
        lambda e: [changed(e[0], param_groups=[{"lr": 1.0}]), e[1]],
        "state has no betas, eps, weight_decay, but FusedAdam should",
    ),
}


@pytest.mark.parametrize("wrong", list(WRONG))
def test_what_does_not_fit_is_refused_and_changes_nothing(wrong: str) -> None:
    make, message = WRONG[wrong]
    saved = saved_by(2, inside="FusedAdam", dtype=HALF)
    params, optimizer = built(None, SIZES, inside="FusedAdam", dtype=HALF)
    trained(params, optimizer, range(1))
    before = seen(params, optimizer)
    with pytest.raises(ValueError, match=message) as caught:
        optimizer.load_state_dict(make(saved), load_from_fp32_weights=True)
    assert "\n" not in str(caught.value)
    assert seen(params, optimizer) == before


def test_one_rank_that_cannot_load_stops_all() -> None:
    saved = saved_by(2)

    def run(group: Group) -> str:
        params, optimizer = built(group, SIZES)
        before = seen(params, optimizer)
        given = saved[:1] if place(group) == 1 else saved
        try:
            optimizer.load_state_dict(given, load_from_fp32_weights=True)
        except ValueError as error:
            assert seen(params, optimizer) == before
            return str(error)
        return ""

    told = on_ranks(2, run)
    assert "another rank" in told[0]
    assert "but should have all" in told[1]


def test_a_state_that_is_no_partition_is_refused_when_it_is_saved() -> None:
    params, optimizer = built(None, inside="FusedAdam")
    trained(params, optimizer, range(1))
    optimizer.state[optimizer.groups[0].master]["table"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"state table has shape \(3, 3\), but should have"):
        optimizer.state_dict()


def test_bf16_optimizer_names_the_owner_of_such_a_state() -> None:
    (entry,) = saved_by(1, dtype=BRAIN)
    param = torch.nn.Parameter(torch.ones(4, dtype=BRAIN))
    make: Any = BF16Optimizer
    optimizer = make(FusedAdam([param]), param_names={param: "p0"})
    with pytest.raises(ValueError, match="it seems to be that of a ZeRO optimizer"):
        optimizer.load_state_dict([entry])


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.usefixtures("replay")
def test_a_dict_that_was_loaded_counts_no_later_steps(side: str) -> None:
    """Torch's Adam takes the counter of the dict itself."""
    param = torch.nn.Parameter(torch.ones(4, dtype=HALF))
    optimizer = CLASSES[side]["FP16Optimizer"](torch.optim.Adam([param]), verbose=False)
    param.grad = torch.ones_like(param)
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert saved["optimizer_state_dict"]["state"][0]["step"].item() == 1.0


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_a_rate_in_a_tensor_is_saved_as_it_is_now(cpu_offload: bool) -> None:
    _, optimizer = built(None, SIZES, inside="FusedAdam")
    rate = torch.tensor(0.5, dtype=torch.float64)
    optimizer.param_groups[0]["lr"] = rate
    saved: Entry = optimizer.state_dict(cpu_offload=cpu_offload)
    rate.mul_(0.5)
    assert saved["param_groups"][0]["lr"] == 0.5
