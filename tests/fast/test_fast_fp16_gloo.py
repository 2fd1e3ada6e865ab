"""The fast FP16 optimizers over groups of gloo give the bits of simulated ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.helpers.mesh import BADS, Experts, Mesh, Training, compared, experts

pytestmark = [
    pytest.mark.usefixtures("replay", "polite"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch was built without gloo"),
]
TORCH: Any = dist  # exports without saying so
TURN = threading.Lock()


@pytest.fixture
def polite(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread runs at a time; one that waits in a group of gloo lets others run."""
    genuine = dist.all_reduce

    def all_reduce(tensor: Tensor, op: Any, group: Any) -> None:
        if not isinstance(group, TORCH.ProcessGroupGloo):
            genuine(tensor, op=op, group=group)
            return
        TURN.release()
        try:
            genuine(tensor, op=op, group=group)
        finally:
            TURN.acquire()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)


def on_gloo(rows: int, columns: int, run: Callable[[Mesh], Any]) -> list[Any]:
    """Run a function on every rank of a mesh, each in a thread with groups of gloo."""
    store, results = TORCH.HashStore(), {}

    def group(name: str, rank: int, size: int) -> Any:
        return TORCH.ProcessGroupGloo(TORCH.PrefixStore(name, store), rank, size)

    def one(number: int) -> None:
        row, column = divmod(number, columns)
        groups = group(f"row {row}", column, columns), group(f"column {column}", row, rows)
        with TURN:
            results[number] = run(Mesh(*groups, (column, row), (rows, columns), []))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(rows * columns)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(rows * columns)]


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
    said = compared(2, 2, cls=cls, given=given, norm_type=norm_type, fast=on_gloo)
    assert [step[0] for step in said] == [str(bad is not None) for bad in BADS]
