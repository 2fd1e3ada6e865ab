"""Ranks in several groups: refusals, names of experts in any order, checkpoints with experts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.mesh import Experts, Mesh, trained
from tests.helpers.partitions import built, seen
from tests.helpers.partitions import trained as stepped
from tests.helpers.sides import CLASSES, SIDES
from tests.helpers.universal_checkpoint import SHAPES, UNIVERSAL
from twinstep.contract.agreement import on_all_ranks
from twinstep.parity.cases.fixed_inputs import bits
from twinstep.parity.ranks.world import Rank, World

pytestmark = pytest.mark.usefixtures("replay")

BOTH = pytest.mark.parametrize("side", SIDES)
BRAIN = torch.bfloat16
MASTERS = "single_partition_of_fp32_groups"


@pytest.mark.parametrize("refusing", range(6))
def test_what_one_rank_refuses_is_refused_in_all_of_its_groups_and_theirs(refusing: int) -> None:
    """Groups of columns first: those of its row hear of it from the ranks of its column."""

    def run(rank: Rank) -> str:
        def read() -> int:
            if rank.number == refusing:
                raise ValueError("it is mine")
            return 7

        groups = [rank.group("row"), None, rank.group("column"), rank.group("row")]
        try:
            return str(on_all_ranks(read, groups, torch.device("cpu")))
        except ValueError as error:
            return str(error)

    found = World({"row": 2, "column": 3}).run(run)
    others = [text for rank, text in enumerate(found) if rank != refusing]
    assert found[refusing] == "it is mine"
    assert others == others[:1] * 5
    assert "another rank" in others[0]


def test_what_no_rank_refuses_is_done_by_all() -> None:
    def run(rank: Rank) -> tuple[int, list[str]]:
        groups = [rank.group("row"), rank.group("column"), rank.group("row")]
        found = on_all_ranks(lambda: rank.number, groups, torch.device("cpu"))
        return found, [call.group for call in rank.sent]

    found = World({"row": 2, "column": 2}).run(run)
    assert found == [(rank, ["row", "column"]) for rank in range(4)]


class TwoKinds(Experts):
    """Experts of two names."""

    def mark(self) -> None:
        """The third parameter is of another name than the last."""
        super().mark()
        self.params[2].group_name = "first"  # type: ignore[attr-defined]


@BOTH
@pytest.mark.parametrize("kind", ["FP16Optimizer", "FP16UnfusedOptimizer"])
def test_ranks_may_name_their_experts_in_any_order(side: str, kind: str) -> None:
    """A rank that met the groups in the order of its own dict would wait for another one's."""

    def run(rank: Rank, turned: bool) -> list[object]:
        here, copies = rank.group("expert"), rank.group("copy")
        names = ["first", "e"] if turned and rank.number in (1, 2) else ["e", "first"]
        other = {"e": rank.group("expert"), "first": rank.new_group([0, 1, 2, 3])}
        groups = {name: other[name] for name in names}
        given = {"expert_groups": groups, "expert_data_groups": dict.fromkeys(names, copies)}
        place = (rank.place["expert"], rank.place["copy"])
        mesh = Mesh(here, copies, place, (2, 2), rank.sent)
        return trained(TwoKinds(side, mesh, kind=kind, given=lambda mesh: given))

    world = World({"copy": 2, "expert": 2}, seed=3)
    assert world.run(lambda rank: run(rank, True)) == world.run(lambda rank: run(rank, False))


def experts_of(rank: Rank) -> dict[str, Any]:
    """The second group is of experts, whose copies are on half of the ranks."""

    def marks(params: Sequence[Any]) -> None:
        for param in params[2:]:
            param.allreduce, param.group_name = False, "ep"

    return {
        "dp_process_group": rank.group("copy", "expert"),
        "expert_groups": {"ep": rank.group("expert")},
        "expert_data_groups": {"ep": rank.group("copy")},
        "marks": marks,
        "has_moe_layers": True,
        "second": {"moe": True, "name": "ep"},
        "clip_grad": 0.5,
    }


@BOTH
@pytest.mark.parametrize("axes", [("copy", "expert"), ("expert", "copy")], ids="-".join)
def test_experts_on_four_ranks_resume_from_the_entries_of_all(
    side: str, axes: tuple[str, str]
) -> None:
    """A rank has other numbers among all ranks and among the copies of its experts."""
    world = World(dict.fromkeys(axes, 2), seed=1)

    def begun(rank: Rank) -> tuple[list[object], Any]:
        params, optimizer = built(side, **experts_of(rank))
        stepped(params, optimizer, range(2), seed=1000 * rank.place["expert"])
        entry = optimizer.state_dict()
        stepped(params, optimizer, range(2, 4), seed=1000 * rank.place["expert"])
        return seen(params, optimizer), entry

    wanted, entries = zip(*world.run(begun), strict=True)

    def resumed(rank: Rank) -> list[object]:
        params, optimizer = built(side, **experts_of(rank))
        optimizer.load_state_dict(list(entries), load_from_fp32_weights=True)
        stepped(params, optimizer, range(2, 4), seed=1000 * rank.place["expert"])
        return seen(params, optimizer)

    assert world.run(resumed) == list(wanted)
    assert len({str(each) for each in wanted}) == 2  # one for each rank of experts


def crossed(side: str, rank: Rank) -> tuple[list[nn.Parameter], Any]:
    """Two groups, one over rows and one over columns."""
    home = CLASSES[side]
    params = [nn.Parameter(torch.zeros(shape, dtype=BRAIN)) for shape in SHAPES.values()]
    expert: Any = params[-1]
    expert.allreduce, expert.group_name = False, "ep"
    groups = [{"params": params[:-1]}, {"params": [expert], "moe": True, "name": "ep"}]
    optimizer = home["BF16Optimizer"](
        home["FusedAdam"](groups),
        param_names=dict(zip(params, SHAPES, strict=True)),
        dp_process_group=rank.group("row"),
        expert_data_groups={"ep": rank.group("column")},
        has_moe_layers=True,
    )
    return params, optimizer


@BOTH
@pytest.mark.parametrize("universal", [True, False], ids=["universal", "entries"])
@pytest.mark.parametrize("refusing", [0, 3])
def test_a_state_that_one_rank_refuses_is_loaded_by_no_rank_of_any_group(
    side: str, universal: bool, refusing: int, tmp_path: Path
) -> None:
    """The rank across has no group in common with it."""
    for name in ("whole", "cut"):
        shutil.copytree(UNIVERSAL, tmp_path / name)
        torch.save({"param_groups": []}, tmp_path / name / "zero" / "optimizer_state.pt")
    (tmp_path / "cut" / "zero" / "1.weight" / "exp_avg.pt").write_bytes(b"cut")

    def run(rank: Rank) -> tuple[str, list[float]]:
        params, optimizer = crossed(side, rank)
        if universal:
            folder = tmp_path / ("cut" if rank.number == refusing else "whole")
            load = partial(optimizer.load_state_dict, [], checkpoint_folder=folder)
        else:
            entry = optimizer.state_dict()
            masters = [flat + 1.0 for flat in entry[MASTERS]]
            masters = masters[rank.number == refusing :]
            entries = [{**entry, MASTERS: masters}] * 2
            load = partial(optimizer.load_state_dict, entries, load_from_fp32_weights=True)
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the sentence is compared below
            load()
        return str(caught.value), [float(param.detach().abs().sum()) for param in params]

    found = World({"row": 2, "column": 2}).run(run)
    assert [values for _, values in found] == [[0.0] * 3] * 4
    others = {text for rank, (text, _) in enumerate(found) if rank != refusing}
    assert len(others) == 1
    assert "another rank" in others.pop()
    assert ("exp_avg.pt" if universal else MASTERS) in found[refusing][0]


@BOTH
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_universal_checkpoint_goes_on_alike_on_any_number_of_ranks(side: str, size: int) -> None:
    """Ten elements: slices do not begin where parameters do, and three of eight own only padding.

    The clip norm of the run stays, and steps go on from that of the file on all ranks.
    """

    def run(group: dist.ProcessGroup | None) -> list[object]:
        home = CLASSES[side]
        params = [nn.Parameter(torch.zeros(shape, dtype=BRAIN)) for shape in SHAPES.values()]
        names = dict(zip(params, SHAPES, strict=True))
        inside = home["FusedAdam"](params, lr=0.1)
        optimizer = home["BF16Optimizer"](
            inside, param_names=names, dp_process_group=group, clip_grad=0.25
        )
        optimizer.load_state_dict([], checkpoint_folder=UNIVERSAL)
        loaded = [bits(param.detach()) for param in params]
        for step in range(2):
            for place, param in enumerate(params):
                param.grad = torch.full_like(param, 3.0 + place - 2 * step)
            optimizer.update_hp_grads(clear_lp_grads=True)
            optimizer.step()
        whole = [
            bits(optimizer.get_full_hp_param(name, key))
            for name in SHAPES
            for key in (None, "exp_avg", "exp_avg_sq")
        ]
        (state,) = optimizer.state.values()
        facts = [optimizer.clip_grad, optimizer.get_global_norm(), float(state["step"])]
        return [loaded, *whole, *facts, *(bits(param.detach()) for param in params)]

    wanted = run(None)
    clip_grad, norm, steps = wanted[-6:-3]
    assert (clip_grad, steps) == (0.25, 5.0)
    assert isinstance(norm, float)
    assert norm > 0.25
    found = World(size, seed=size).run(lambda rank: run(rank.group("data")))
    assert found == [wanted] * size


@BOTH
@pytest.mark.parametrize("kind", ["FP16Optimizer", "FP16UnfusedOptimizer"])
def test_a_parameter_whose_elements_share_memory_is_refused(side: str, kind: str) -> None:
    """Each element would be stepped several times; torch's optimizer inside does not ask."""
    shared = nn.Parameter(torch.zeros(1).half().expand(2, 3))
    inside = torch.optim.SGD([nn.Parameter(torch.zeros(2).half()), shared], lr=0.1)
    sentence = rf"should have memory of its own for each element \[parameter 1, .*{kind}\]"
    with pytest.raises(ValueError, match=sentence):
        CLASSES[side][kind](inside, verbose=False)
