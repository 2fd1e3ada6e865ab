"""Messages between the ranks of an FP16 optimizer do not depend on what they find."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.mesh import BADS, Idle, Mesh, Training, on_mesh
from twinstep.fast.optimizers.fp16 import FP16Optimizer
from twinstep.parity.ranks.errors import RanksFailed
from twinstep.parity.ranks.group import Sent

pytestmark = pytest.mark.usefixtures("replay")

STEP = FP16Optimizer.step


def sent(cls: type[Training], kind: str) -> list[list[Sent]]:
    """The collectives of each rank in steps of which the last rank alone skips some."""

    def run(mesh: Mesh) -> list[Sent]:
        training = cls("fast", mesh, kind=kind)
        for seed, bad in enumerate(BADS):
            training.fill(seed, bad)
            training.optimizer.step()
            training.agreed()
        return list(mesh.calls)

    return on_mesh(1, 2, run)


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
    with pytest.raises(RanksFailed, match="and does not come"):
        sent(cls, "FP16Optimizer")
