"""Messages between the ranks of an FP16 optimizer do not depend on what they find."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.mesh import BADS, Counting, Idle, Mesh, Simulated, Training, on_mesh
from tests.helpers.ranks import Meeting
from twinstep.fast.optimizers.fp16 import FP16Optimizer

pytestmark = pytest.mark.usefixtures("replay", "simulated")

STEP = FP16Optimizer.step
Calls = list[tuple[int, torch.dtype]]


class Mirror(Counting):
    """A handle that hears itself from all ranks: one that sends nothing keeps nobody waiting."""

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        """Note it."""
        self.calls.append((tensor.numel(), tensor.dtype))
        return [tensor.clone() for _ in range(self.world)]


class Mirrors(Simulated):
    """Process groups of these."""

    def __call__(self, name: str, rank: int, world: int, calls: list[Any]) -> Any:
        """One rank's handle."""
        handle = Mirror(Meeting(world), rank, world)
        handle.calls = calls
        return handle


def sent(cls: type[Training], kind: str) -> list[Calls]:
    """The collectives of each rank in steps of which the last rank alone skips some."""

    def run(mesh: Mesh) -> Calls:
        training = cls("fast", mesh, kind=kind)
        for seed, bad in enumerate(BADS):
            training.fill(seed, bad)
            training.optimizer.step()
            training.agreed()
        return list(mesh.calls)

    return on_mesh(1, 2, run, Mirrors)


@pytest.mark.parametrize("kind", ["FP16Optimizer", "FP16UnfusedOptimizer"])
@pytest.mark.parametrize("cls", [Training, Idle])
def test_every_rank_sends_the_same_whatever_it_finds(cls: type[Training], kind: str) -> None:
    """Nobody waits for a rank that has overflowed, or has no gradients."""
    first, second = sent(cls, kind)
    assert first == second
    assert len(first) == 2 + len(BADS)  # at construction one for each group


def overflow_leaves_early(self: FP16Optimizer, closure: None = None) -> None:
    """C11: a rank that overflows knows enough."""
    grads = [param.grad for param in self._params() if param.grad is not None]
    if all(bool(grad.isfinite().all()) for grad in grads):
        STEP(self, closure)


def nothing_to_check(self: FP16Optimizer, closure: None = None) -> None:
    """C19: a rank without gradients takes no part."""
    if any(param.grad is not None for param in self._params()):
        STEP(self, closure)


@pytest.mark.parametrize(
    ("wrong", "cls"),
    [(overflow_leaves_early, Training), (nothing_to_check, Idle)],
    ids=["overflow leaves early", "nothing to check"],
)
def test_a_rank_that_takes_no_part_is_noticed(
    wrong: Any, cls: type[Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C11 and C19 of docs/reference/bugs.md."""
    monkeypatch.setattr(FP16Optimizer, "step", wrong)
    first, second = sent(cls, "FP16Optimizer")
    assert first != second
