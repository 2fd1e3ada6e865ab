"""The fast FP16 optimizers over genuine process groups give the bits of simulated ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.helpers.mesh import BADS, Experts, Mesh, Training, compared, experts
from tests.helpers.ranks import TURN, Group

pytestmark = [
    pytest.mark.usefixtures("replay", "either"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch was built without gloo"),
]
TORCH: Any = dist  # exports without saying so


class Gloo:
    """Groups of the library that torch brings along; every thread is a rank."""

    def __init__(self) -> None:
        self.store = TORCH.HashStore()

    def __call__(self, name: str, rank: int, world: int, calls: list[Any]) -> Any:
        """One rank's group; all of its ranks have to ask for it."""
        store = TORCH.PrefixStore(name, self.store)
        TURN.release()
        try:
            return TORCH.ProcessGroupGloo(store, rank, world)
        finally:
            TURN.acquire()


@pytest.fixture
def either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send collectives over whatever kind of group they are given; who waits lets others run."""
    names = ("all_reduce", "all_gather_object", "get_world_size")
    genuine = {name: getattr(dist, name) for name in names}

    def all_reduce(tensor: Tensor, op: Any, group: Any) -> None:
        if isinstance(group, Group):
            group.all_reduce(tensor, op)
            return
        TURN.release()
        try:
            genuine["all_reduce"](tensor, op=op, group=group)
        finally:
            TURN.acquire()

    def all_gather_object(outputs: list[Any], own: Any, group: Any) -> None:
        if isinstance(group, Group):
            group.all_gather_object(outputs, own)
            return
        TURN.release()
        try:
            genuine["all_gather_object"](outputs, own, group=group)
        finally:
            TURN.acquire()

    def size(group: Any) -> int:
        return group.world if isinstance(group, Group) else genuine["get_world_size"](group)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    monkeypatch.setattr(dist, "get_world_size", size)


def both(mesh: Mesh) -> dict[str, Any]:
    """Experts, and a model over the same ranks."""
    return {"mpu": mesh, **experts(mesh)}


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize(
    ("cls", "given"), [(Training, lambda mesh: {"mpu": mesh}), (Experts, both)]
)
def test_process_groups_of_gloo_give_the_bits_of_simulated_ones(
    cls: type[Training], given: Any, norm_type: float
) -> None:
    said = compared(2, 2, cls=cls, given=given, norm_type=norm_type, groups=Gloo)
    assert [step[0] for step in said] == [str(bad is not None) for bad in BADS]
