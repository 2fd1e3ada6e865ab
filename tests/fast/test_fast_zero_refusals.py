"""Fast ZeroOptimizer: a step that one rank refuses is skipped by all, and the next one is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.ranks import on_ranks
from tests.helpers.zero_built import HALF, SIDE, Group, built, fill, place, seen, trained
from twinstep.contract.errors import MinimumLossScale

pytestmark = pytest.mark.usefixtures("replay", "on_this_side")
MOVING: dict[str, Any] = {
    "dynamic_loss_scale": True,
    "dynamic_loss_args": {"init_scale": 8.0, "scale_window": 100, "delayed_shift": 1},
}
Refuse = Callable[[list[nn.Parameter], Any], None]


@pytest.fixture
def on_this_side() -> Iterator[None]:
    token = SIDE.set("fast")
    yield
    SIDE.reset(token)


def sparse(params: list[nn.Parameter], optimizer: Any) -> None:
    params[0].grad = torch.ones(4, dtype=HALF).to_sparse()
    optimizer.step()


def sparse_sums(params: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.fill_grad_accum_attribute()
    params[0].grad = torch.ones(4, dtype=HALF).to_sparse()
    optimizer.step()


def closure(params: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.step(lambda: 0.0)


def rate(params: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.set_lr("fast")
    try:
        optimizer.step()
    finally:
        optimizer.set_lr(0.1)


def late(params: list[nn.Parameter], optimizer: Any) -> None:
    """A gradient after the last reduction."""
    optimizer.reduce_gradients()
    fill(params, 1.0)
    optimizer.step()


def stepped(optimizer: Any) -> float:
    """The loss scale after a step."""
    optimizer.step()
    return float(optimizer.loss_scale)


REFUSED: list[tuple[Refuse, type[Exception], str]] = [
    (sparse, RuntimeError, "gradient has layout torch.sparse_coo"),
    (sparse_sums, RuntimeError, "gradient has layout torch.sparse_coo"),
    (closure, RuntimeError, "a closure was given"),
    (rate, TypeError, "lr='fast'"),
    (late, RuntimeError, "a gradient that came after reduce_gradients"),
]


@pytest.mark.parametrize("stage2", [False, True])
@pytest.mark.parametrize("inside", ["FusedAdam", "momentum"])
@pytest.mark.parametrize(("refuse", "kind", "says"), REFUSED)
def test_what_one_rank_refuses_no_rank_takes(
    refuse: Refuse, kind: type[Exception], says: str, inside: str, stage2: bool
) -> None:
    """Weights, masters, state, scale and counters are those of before, and the next step works."""

    def run(group: Group) -> list[Any]:
        params, optimizer = built(group, inside=inside, partition_grads=stage2, **MOVING)
        trained(params, optimizer, range(1))
        before = seen(params, optimizer)
        fill(params, 1.0)
        if place(group) == 1:
            with pytest.raises(kind, match=says):
                refuse(params, optimizer)
        else:
            if refuse is sparse_sums:
                optimizer.fill_grad_accum_attribute()
            if refuse is late:
                optimizer.reduce_gradients()
            with pytest.raises(ValueError, match=r"another rank \(1\) cannot"):
                stepped(optimizer)
        # Everything but the last step's facts: overflow, norm, clip norm.
        same = seen(params, optimizer)[:-3] == before[:-3]
        trained(params, optimizer, range(1, 3))
        return [same, seen(params, optimizer)]

    def without(group: Group) -> list[object]:
        params, optimizer = built(group, inside=inside, partition_grads=stage2, **MOVING)
        trained(params, optimizer, range(1))
        trained(params, optimizer, range(1, 3))
        return seen(params, optimizer)

    assert on_ranks(2, run) == [[True, own] for own in on_ranks(2, without)]


@pytest.mark.parametrize(("refuse", "kind", "says"), REFUSED)
def test_one_rank_alone_refuses_at_once(refuse: Refuse, kind: type[Exception], says: str) -> None:
    params, optimizer = built(None, inside="FusedAdam")
    before = seen(params, optimizer)
    fill(params, 1.0)
    with pytest.raises(kind, match=says):
        refuse(params, optimizer)
    assert seen(params, optimizer) == before


def test_ranks_with_other_scales_take_no_step() -> None:
    def run(group: Group) -> list[Any]:
        params, optimizer = built(group, inside="FusedAdam", **MOVING)
        before = seen(params, optimizer)
        if place(group):
            optimizer.override_loss_scale(2.0)
        fill(params, 1.0)
        optimizer.step()
        with pytest.raises(ValueError, match="loss scale differs from that of another rank"):
            _ = optimizer.overflow
        optimizer.override_loss_scale(None)
        return [seen(params, optimizer)[:-3] == before[:-3]]

    assert on_ranks(2, run) == [[True]] * 2


def test_a_step_without_any_gradient_raises_when_something_is_read() -> None:
    """Over ranks only the device knows; one gradient on one rank is enough for all."""

    def run(group: Group) -> list[Any]:
        params, optimizer = built(group, inside="FusedAdam", **MOVING)
        before = seen(params, optimizer)
        optimizer.step()
        with pytest.raises(RuntimeError, match="there is no gradient on any rank"):
            _ = optimizer.loss_scale
        same = seen(params, optimizer)[:-3] == before[:-3]
        if place(group):
            fill(params, 1.0)
        optimizer.step()
        return [same, optimizer.overflow, optimizer.loss_scaler.state_dict()["cur_iter"]]

    assert on_ranks(2, run) == [[True, False, 1]] * 2


def test_an_error_in_backward_of_one_rank_leaves_no_other_waiting() -> None:
    """Buckets that have not left are sent as zeros; the step is skipped, the next one taken."""

    def run(group: Group) -> list[Any]:
        params, optimizer = built(group, inside="FusedAdam", reduce_bucket_size=4, **MOVING)
        before = seen(params, optimizer)

        def broken(grad: torch.Tensor) -> None:
            raise ArithmeticError("no gradient here")

        first = params[0].float() * 1.0
        if place(group):
            first.register_hook(broken)
        loss = (first.sum() * params[2].float()).sum() + params[1].float().sum()
        if place(group):
            with pytest.raises(ArithmeticError, match="no gradient here"):
                optimizer.backward(loss)
            with pytest.raises(ArithmeticError, match="no gradient here"):
                optimizer.step()
        else:
            optimizer.backward(loss)
            optimizer.step()
            with pytest.raises(ValueError, match=r"another rank \(1\) cannot"):
                _ = optimizer.overflow
        same = seen(params, optimizer)[:-3] == before[:-3]
        optimizer.backward(params[0].float().sum())
        optimizer.step()
        return [same, optimizer.overflow, optimizer.get_global_norm()]

    assert on_ranks(2, run) == [[True, False, 2.0]] * 2


@pytest.mark.parametrize("stage2", [False, True])
def test_an_error_in_backward_alone_is_raised_once(stage2: bool) -> None:
    params, optimizer = built(None, inside="FusedAdam", partition_grads=stage2)
    loss = (params[0].float() * torch.ones(4)).sum()
    optimizer.backward(loss)
    with pytest.raises(RuntimeError, match="a second time"):
        optimizer.backward(loss)
    before = params[0].detach().clone()
    optimizer.step()
    assert not torch.equal(params[0], before)


@pytest.mark.parametrize("stage2", [False, True])
def test_a_sparse_gradient_in_backward_is_refused_by_the_step(stage2: bool) -> None:
    """Other ranks are in the middle of their messages."""

    def run(group: Group) -> list[Any]:
        params, optimizer = built(group, inside="FusedAdam", partition_grads=stage2, **MOVING)
        before = seen(params, optimizer)
        param = params[0]
        if place(group):
            param.grad = torch.ones(4, dtype=HALF).to_sparse()
            loss = params[1].float().sum()
        else:
            loss = param.float().sum()
        optimizer.backward(loss)
        with pytest.raises((RuntimeError, ValueError), match="sparse|another rank"):
            stepped(optimizer)
        return [seen(params, optimizer)[:-3] == before[:-3]]

    assert on_ranks(2, run) == [[True]] * 2


@pytest.mark.parametrize("stage2", [False, True])
def test_sums_that_came_after_a_reduction_are_reduced_by_the_step(stage2: bool) -> None:
    def run(group: Group) -> float:
        params, optimizer = built(group, inside="FusedAdam", partition_grads=stage2)
        fill(params, 1.0)
        optimizer.reduce_gradients()
        fill(params, 2.0)
        optimizer.fill_grad_accum_attribute()
        optimizer.step()
        return optimizer.get_global_norm()

    assert on_ranks(2, run) == [pytest.approx(3.0 * 12.0**0.5)] * 2


def test_gradients_are_forgotten_by_all_with_zero_grad() -> None:
    def run(group: Group) -> list[Any]:
        params, optimizer = built(group, inside="FusedAdam", **MOVING)
        optimizer.backward(params[0].float().sum() * 1000.0)
        optimizer.zero_grad()
        optimizer.backward(params[0].float().sum())
        optimizer.step()
        return [optimizer.get_global_norm()]

    assert on_ranks(2, run) == [[2.0]] * 2


def test_an_overflow_at_the_floor_changes_nothing_and_raises_when_read() -> None:
    floor = {**MOVING["dynamic_loss_args"], "init_scale": 1.0}

    def run(group: Group) -> list[Any]:
        params, optimizer = built(group, dynamic_loss_scale=True, dynamic_loss_args=floor)
        before = seen(params, optimizer)
        fill(params, float("inf") if place(group) else 1.0)
        with pytest.raises(MinimumLossScale):
            optimizer.step()
        return [seen(params, optimizer)[:-3] == before[:-3]]

    assert on_ranks(2, run) == [[True]] * 2


def test_hooks_are_gone_after_destroy() -> None:
    def run(group: Group) -> list[Any]:
        params, optimizer = built(group, inside="FusedAdam", reduce_bucket_size=1)
        optimizer.destroy()
        params[0].float().sum().backward()
        kept = params[0].grad is not None
        optimizer.step()
        return [kept, optimizer.get_global_norm()]

    assert dist.is_initialized() is False
    assert on_ranks(2, run) == [[True, 2.0]] * 2
