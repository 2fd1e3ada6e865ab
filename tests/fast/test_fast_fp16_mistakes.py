"""Mistakes of the FP16 optimizers about ranks are noticed; each was shipped by some project."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import twinstep.fast.optimizers.parallelism
from tests.helpers.mesh import Experts, Unreduced, compared, engine, experts, norms_of_experts
from twinstep.fast.optimizers.fp16 import FP16Optimizer
from twinstep.parity.ranks.errors import RanksFailed

pytestmark = pytest.mark.usefixtures("replay")

SORTED, STEP = twinstep.fast.optimizers.parallelism.Parallelism.gradients, FP16Optimizer.step


def without(**fields: Any) -> Callable[..., Any]:
    """Make the fast side forget something of how gradients are sorted."""

    def wrong(self: Any, *args: Any, **options: Any) -> Any:
        return replace(SORTED(self, *args, **options), **fields)

    return wrong


def averaged_by_nobody(self: Any, *args: Any, **options: Any) -> Any:
    """Experts are added over their copies, as over other experts."""
    found = SORTED(self, *args, **options)
    return replace(
        found, shares=[replace(s, experts=s.replicas, replicas=None) for s in found.shares]
    )


def over_the_wrong_ranks(self: Any, *args: Any, **options: Any) -> Any:
    """The model's sums are added over those that hold the same part of it."""
    column = self.mpu.get_data_parallel_group()
    return replace(SORTED(self, *args, **options), model=[column])


def over_the_world(self: Any, *args: Any, **options: Any) -> Any:
    """Without a model-parallel unit, sums are added over all ranks."""
    return replace(SORTED(self, *args, **options), model=[cast(Any, dist.group.WORLD)])


def alone_in_its_row(self: Any, *args: Any, **options: Any) -> Any:
    """A model that one rank holds has nobody to agree with."""
    found = SORTED(self, *args, **options)
    several = self.mpu.get_model_parallel_group().size() > 1
    return found if several else replace(found, model=(), unreduced=())


def scale_of_its_own(self: Any, closure: None = None) -> None:
    """The scale moves by what this rank found, the step by what all have."""
    scaler, control = self.loss_scaler, self._step.control
    before, found = scaler.state_dict(), scaler.has_overflow(self._params())
    STEP(self, closure)
    voted = control["found_inf"].clone()
    scaler.load_state_dict(before)
    scaler.update_scale(found)
    control["found_inf"].copy_(voted)


def reports_its_part(self: Any, closure: None = None) -> None:
    """All clip alike, and each tells of the norm of what it has."""
    grads = [param.grad.float().flatten() for param in self._params() if param.grad is not None]
    own = torch.cat(grads).norm() / self.loss_scale
    STEP(self, closure)
    self._step.control["norm"].copy_(own)


@pytest.mark.parametrize(
    ("name", "wrong", "world", "options"),
    [
        ("counts_in_norm", lambda param, rank: True, (1, 2), {}),
        ("expert_name", lambda param: "", (1, 2), {"cls": Experts, "given": experts}),
        ("gradients", without(model=()), (1, 2), {}),
        ("gradients", without(uncounted=()), (1, 2), {"slot": 0}),
        (
            "gradients",
            without(unreduced=()),
            (2, 1),
            {"cls": Unreduced, "given": lambda mesh: {"mpu": mesh, **engine(mesh, False)}},
        ),
        ("gradients", over_the_wrong_ranks, (2, 2), {}),
        ("gradients", over_the_world, (2, 1), {"given": lambda mesh: engine(mesh, True)}),
        (
            "gradients",
            alone_in_its_row,
            (2, 1),
            {"cls": Unreduced, "given": lambda mesh: {"mpu": mesh, **engine(mesh, False)}},
        ),
        ("step", scale_of_its_own, (1, 2), {}),
        ("step", reports_its_part, (1, 2), {}),
    ],
    ids=[
        "duplicates count",
        "experts are shared",
        "this rank alone",
        "skip missed",
        "not agreed",
        "wrong ranks",
        "no group means world",
        "group of one",
        "own scale",
        "own part reported",
    ],
)
def test_a_mistake_about_ranks_is_noticed(
    name: str,
    wrong: Any,
    world: tuple[int, int],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shipped by some project (docs/reference/bugs.md): B17, C02, C10, C13, E07, E14, G32."""
    homes: dict[str, Any] = {
        "gradients": twinstep.fast.optimizers.parallelism.Parallelism,
        "step": FP16Optimizer,
    }
    monkeypatch.setattr(homes.get(name, twinstep.fast.optimizers.parallelism), name, wrong)
    # Ranks notice themselves that their scales differ.
    own_scale = wrong is scale_of_its_own
    with pytest.raises(RanksFailed if own_scale else AssertionError) as caught:
        compared(*world, **options)
    assert not own_scale or "loss scale differs" in str(caught.value)


def test_experts_that_are_added_over_their_copies_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = norms_of_experts("reference", [1.7] * 2, experts, 2.0)
    monkeypatch.setattr(
        twinstep.fast.optimizers.parallelism.Parallelism, "gradients", averaged_by_nobody
    )
    assert norms_of_experts("fast", [1.7] * 2, experts, 2.0) != right
