"""The fast BF16Optimizer over ranks does what the reference does, bit for bit."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.partitions import BRAIN, built, seen, trained
from tests.helpers.ranks import on_ranks
from tests.helpers.sides import SIDES

pytestmark = pytest.mark.usefixtures("replay")


@pytest.mark.parametrize("accumulation", [torch.float32, BRAIN])
@pytest.mark.parametrize("bucket", [5_000_000_000, 4])
def test_the_world_size_does_not_matter(bucket: int, accumulation: torch.dtype) -> None:
    def run(side: str, group: dist.ProcessGroup | None) -> list[object]:
        options: dict[str, Any] = {"clip_grad": 0.5, "grad_acc_dtype": accumulation}
        params, optimizer = built(
            side, dp_process_group=group, allgather_bucket_size=bucket, **options
        )
        trained(params, optimizer, range(3))
        return seen(params, optimizer)

    (alone,) = on_ranks(1, lambda group: run("reference", group))
    for side, world in product(SIDES, (2, 3, 4)):
        assert on_ranks(world, partial(run, side)) == [alone] * world, (side, world)


class Unit:
    """A model-parallel unit of one group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """All ranks."""
        return self.group

    def get_data_parallel_group(self) -> None:
        """None: each part of the model is on one rank."""

    def get_tensor_model_parallel_rank(self) -> int:
        """This rank's place."""
        return self.group.rank()


@pytest.mark.parametrize("kind", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("experts", [False, True])
def test_norms_over_a_model_and_its_experts_equal_the_reference(kind: float, experts: bool) -> None:
    """Every rank has other gradients; a replica counts once; one rank's overflow skips all."""

    def marks(params: list[nn.Parameter]) -> None:
        params[0].model_parallel = True  # type: ignore[attr-defined]
        for param in params[2:] if experts else []:
            param.allreduce, param.group_name = False, "ep"  # type: ignore[attr-defined]

    def run(side: str, group: dist.ProcessGroup | None) -> list[object]:
        assert group is not None
        more: dict[str, Any] = {"mpu": Unit(group)}
        if experts:
            more |= {"expert_groups": {"ep": group}, "has_moe_layers": True}
            more |= {"second": {"moe": True, "name": "ep"}}
        params, optimizer = built(side, clip_grad=0.5, norm_type=kind, marks=marks, **more)
        trained(params, optimizer, range(2), seed=1000 * group.rank())
        first = seen(params, optimizer)
        shared, named = optimizer.get_grads_for_reduction()
        sizes = [len(shared), {name: len(flats) for name, flats in named.items()}]
        params[0].grad = torch.full_like(params[0], math.nan if group.rank() else 1.0)
        optimizer.update_hp_grads()
        optimizer.step()
        return [*first, sizes, *seen(params, optimizer)]

    ours = on_ranks(2, lambda group: run("fast", group))
    assert ours == on_ranks(2, lambda group: run("reference", group))
    assert all(row[-2] is True for row in ours)


def test_the_comparison_over_ranks_can_say_no() -> None:
    def run(side: str, group: dist.ProcessGroup | None) -> list[object]:
        params, optimizer = built(side, dp_process_group=group)
        trained(params, optimizer, range(1), seed=group.rank() if group is not None else 0)
        return seen(params, optimizer)

    (alone,) = on_ranks(1, lambda group: run("reference", group))
    assert on_ranks(2, lambda group: run("fast", group)) != [alone] * 2
