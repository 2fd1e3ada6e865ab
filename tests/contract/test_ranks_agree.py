"""Ranks in several groups: refusals, names of experts in any order, checkpoints with experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.mesh import Experts, Mesh, trained
from tests.helpers.partitions import built, seen
from tests.helpers.partitions import trained as stepped
from tests.helpers.sides import CLASSES, SIDES
from tests.helpers.universal_checkpoint import SHAPES
from twinstep.parity.ranks.world import Rank, World

pytestmark = pytest.mark.usefixtures("replay")

BOTH = pytest.mark.parametrize("side", SIDES)
BRAIN = torch.bfloat16
MASTERS = "single_partition_of_fp32_groups"


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
def test_entries_are_in_the_order_of_ranks_that_split_what_is_shared(side: str) -> None:
    """As many ranks have copies of the experts; some have another number among those."""
    world = World({"row": 2, "column": 2})

    def masters(optimizer: Any) -> list[list[float]]:
        return [master.tolist() for master in optimizer.fp32_groups_flat_partition]

    def begun(rank: Rank) -> tuple[Any, Any]:
        _, optimizer = crossed(side, rank)
        for master in optimizer.fp32_groups_flat_partition:
            master.data += 1.0 + rank.number
        return optimizer.state_dict(), masters(optimizer)

    entries, wanted = zip(*world.run(begun), strict=True)

    def resumed(rank: Rank) -> list[list[float]]:
        _, optimizer = crossed(side, rank)
        numbers = dist.get_process_group_ranks(rank.group("row"))
        optimizer.load_state_dict([entries[at] for at in numbers], load_from_fp32_weights=True)
        return masters(optimizer)

    assert world.run(resumed) == list(wanted)


@BOTH
@pytest.mark.parametrize("refusing", [0, 3])
def test_a_state_that_one_rank_refuses_is_loaded_by_no_rank_of_any_group(
    side: str, refusing: int
) -> None:
    """The rank across has no group in common with it."""

    def run(rank: Rank) -> tuple[str, list[float]]:
        params, optimizer = crossed(side, rank)
        entry = optimizer.state_dict()
        masters = [flat + 1.0 for flat in entry[MASTERS]][rank.number == refusing :]
        entries = [{**entry, MASTERS: masters}] * 2
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the sentence is compared below
            optimizer.load_state_dict(entries, load_from_fp32_weights=True)
        return str(caught.value), [float(param.detach().abs().sum()) for param in params]

    found = World({"row": 2, "column": 2}).run(run)
    assert [values for _, values in found] == [[0.0] * 3] * 4
    others = {text for rank, (text, _) in enumerate(found) if rank != refusing}
    assert len(others) == 1
    assert "another rank" in others.pop()
    assert MASTERS in found[refusing][0]
