"""Rules of a step that every optimizer class of both sides keeps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import lr_scheduler

from tests.helpers.battery import (
    COUNTED,
    EVERY,
    HYPER,
    PLAINS,
    WRAPPED,
    Subject,
    advance,
    fill,
    masters_of,
    observed,
    steps_of,
)
from tests.helpers.sides import COUNTING, SIDES
from twinstep.parity.cases.fixed_inputs import bits, moderate

pytestmark = pytest.mark.usefixtures("replay")

SCALING = {"init_scale": 4.0, "scale_window": 2, "min_scale": 1.0}


def scaled(subject: Subject) -> dict[str, Any]:
    """A dynamic loss scale, where the class has one."""
    if subject.name == "BF16Optimizer":
        return {}
    return {"dynamic_loss_scale": True, "dynamic_loss_args": SCALING}


def weights(params: list[Parameter]) -> list[list[int]]:
    return [bits(param.detach()) for param in params]


@WRAPPED
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_a_gradient_that_is_not_finite_skips_the_step(
    subject: Subject, bad: float, first: bool
) -> None:
    """Edges BF-1, OV-7: nothing moves but the loss scale, and gradients are dropped."""
    params = subject.parameters(5, 3)
    optimizer = subject(params, hyper=HYPER, **scaled(subject))
    if not first:
        fill(params, 1)
        advance(optimizer)
        optimizer.zero_grad()
    before = observed(optimizer, params)
    fill(params, 2, bad=bad)
    advance(optimizer)
    assert optimizer.overflow
    assert not math.isfinite(optimizer.get_global_norm())
    if subject.name == "BF16Optimizer":
        assert not any(bool(group.accumulator.any()) for group in optimizer.groups)
        optimizer.zero_grad()
    else:
        counters = [optimizer.state_dict()[key] for key in ("cur_iter", "last_overflow_iter")]
        assert counters == ([1, 0] if first else [2, 1])
        del before["scale"]
        assert optimizer.loss_scale == 2.0
    after = observed(optimizer, params)
    moved = {what for what in before if after[what] != before[what]}
    assert moved == {"overflow", "norm"}
    assert bool(optimizer.state) != first
    fill(params, 3)
    advance(optimizer)
    assert (params[0].grad is None) == (subject.name == "FP16Optimizer")
    assert not optimizer.overflow
    assert weights(params) != [one[2] for one in before["weights"]]  # type: ignore[attr-defined]


@PLAINS
def test_a_parameter_without_a_gradient_is_left_alone(subject: Subject) -> None:
    """Its counter, too, where it has one: it advances only with a gradient."""
    params = subject.parameters(2, 3, 4)
    optimizer = subject(params, hyper=HYPER)
    for seed, without in ((1, 2), (2, 2), (3, 0)):
        fill(params, seed, missing=[without])
        before = weights(params)
        advance(optimizer)
        moved = [now != then for now, then in zip(weights(params), before, strict=True)]
        assert moved == [slot != without for slot in range(3)]
        assert (params[2] in optimizer.state and bool(optimizer.state[params[2]])) == (seed == 3)
    counted = [2, 3, 1] if subject.name in COUNTING else [3, 3, 3]
    assert [steps_of(optimizer, param) for param in params] == counted


@WRAPPED
def test_a_missing_gradient_is_a_gradient_of_zero(subject: Subject) -> None:
    """Edges FP-3, FP-13, BF-1, BF-11: decay and moments go on, even where nothing has one."""
    runs = []
    for zeros in (False, True):
        params = subject.parameters(3, 4)
        optimizer = subject(params, hyper=HYPER)
        for seed, missing in ((1, [1]), (2, []), (3, [0, 1])):
            fill(params, seed, missing=missing)
            for slot in missing if zeros else []:
                params[slot].grad = torch.zeros_like(params[slot])
            advance(optimizer)
            assert not optimizer.overflow
            assert (optimizer.get_global_norm() == 0.0) == (len(missing) == 2)
            optimizer.zero_grad()
        runs.append(observed(optimizer, params))
    assert runs[0] == runs[1]


@EVERY
def test_empty_parameters_anywhere_change_nothing_for_others(subject: Subject) -> None:
    """Edges FA-5, TF-9: first, between, last, and alone in a group."""
    alone = subject.parameters(5, 3)
    among = subject.parameters(0, 5, 0, 3, 0, 0)
    for param, like in zip((among[1], among[3]), alone, strict=True):
        param.data.copy_(like)
    groups = [[{"params": alone}], [{"params": among[:5]}, {"params": among[5:]}]]
    optimizers = [subject(group, hyper=HYPER) for group in groups]
    for seed in range(2):
        fill(alone, seed)
        for param in among:
            param.grad = torch.zeros_like(param)
        for param, like in zip((among[1], among[3]), alone, strict=True):
            assert like.grad is not None
            param.grad = like.grad.clone()
        for optimizer in optimizers:
            advance(optimizer)
            optimizer.zero_grad()
    assert weights([among[1], among[3]]) == weights(alone)
    assert [param.numel() for param in among] == [0, 5, 0, 3, 0, 0]


@WRAPPED
def test_frozen_parameters_are_left_alone(subject: Subject) -> None:
    """Edge FP-2; a group may have nothing to train."""
    frozen, trained, other = subject.parameters(4, 3, 2)
    frozen.requires_grad = other.requires_grad = False
    where, before = frozen.data_ptr(), weights([frozen, other])
    optimizer = subject([{"params": [frozen, trained]}, {"params": [other]}], hyper=HYPER)
    was = weights([trained])
    fill([trained], 1)
    advance(optimizer)
    assert weights([frozen, other]) == before
    assert weights([trained]) != was
    assert frozen.data_ptr() == where
    assert sum(int(master.count_nonzero()) for master in masters_of(optimizer)) == 3


@EVERY
def test_zero_grad_does_what_it_is_told(subject: Subject) -> None:
    params = subject.parameters(3)
    optimizer = subject(params)
    for told, drops in (({}, True), ({"set_to_none": True}, True), ({"set_to_none": False}, False)):
        fill(params, 1)
        if hasattr(optimizer, "update_hp_grads"):
            optimizer.update_hp_grads()
        held = params[0].grad
        optimizer.zero_grad(**told)
        assert params[0].grad is (None if drops else held)
        assert held is not None
        assert drops or not held.any()
        if hasattr(optimizer, "clear_hp_grads"):
            (group,) = optimizer.groups
            assert (bool(group.accumulator.any()), group.has_gradient) == (False, [False])


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("constructed", "told", "drops"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, True)],
)
def test_set_grad_none_is_what_zero_grad_does_unless_told(
    side: str, constructed: bool, told: bool | None, drops: bool
) -> None:
    """Edge FA-3."""
    params = Subject(side, "FusedAdam").parameters(3)
    fill(params, 1)
    Subject(side, "FusedAdam")(params, set_grad_none=constructed).zero_grad(told)
    assert (params[0].grad is None) == drops
    assert drops or (params[0].grad is not None and not params[0].grad.any())


@PLAINS
def test_a_closure_runs_with_gradients_and_its_loss_comes_back(subject: Subject) -> None:
    """Edge FA-9."""
    params = subject.parameters(3)
    optimizer = subject(params, hyper=HYPER)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (params[0] * params[0]).sum()
        loss.backward()
        return loss.item()

    wanted = (params[0] * params[0]).sum().item()
    with torch.no_grad():
        assert optimizer.step(closure) == wanted
    assert steps_of(optimizer, params[0]) == 1
    assert optimizer.step() is None


@WRAPPED
def test_schedulers_and_set_lr_reach_the_inner_optimizer(subject: Subject) -> None:
    params = subject.parameters(3, 2)
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.25}]
    optimizer = subject(groups, hyper={"lr": 0.5})
    schedule = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for seed in range(2):
        fill(params, seed)
        advance(optimizer)
        schedule.step()
    inner = optimizer.optimizer.param_groups
    assert [group["lr"] for group in inner] == [0.125, 0.0625]
    assert optimizer.get_lr() == 0.125
    optimizer.set_lr(0.375)
    assert [group["lr"] for group in inner] == [0.375, 0.375]


@EVERY
def test_step_hooks_of_torch_run(subject: Subject) -> None:
    params = subject.parameters(3)
    optimizer, calls = subject(params), list[str]()
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for seed in range(2):
        fill(params, seed)
        advance(optimizer)
    assert calls == ["before", "after"] * 2


@WRAPPED
def test_masters_follow_model_weights_that_somebody_loaded(subject: Subject) -> None:
    params = subject.parameters(4, 2)
    optimizer = subject(params)
    for seed, param in enumerate(params):
        param.data.copy_(moderate(param.numel(), 90 + seed, param.dtype))
    before = weights(params)
    optimizer.refresh_fp32_params()
    flat = torch.cat([master.detach().reshape(-1) for master in masters_of(optimizer)])
    assert bits(flat) == bits(torch.cat([param.detach().float() for param in params]))
    assert weights(params) == before


def transposed(seed: int) -> Tensor:
    return moderate(600, seed, torch.float32).reshape(20, 30).t()


def strided(seed: int) -> Tensor:
    return moderate(1200, seed, torch.float32).reshape(30, 40)[:, :20]


def plain(seed: int) -> Tensor:
    return moderate(600, seed, torch.float32).reshape(30, 20)


@PLAINS
@pytest.mark.parametrize(
    ("weight", "gradient"),
    [
        (transposed, transposed),
        (transposed, plain),
        (plain, transposed),
        (strided, plain),
        (strided, strided),
    ],
)
def test_any_layout_steps_like_a_contiguous_one(
    subject: Subject, weight: Callable[[int], Tensor], gradient: Callable[[int], Tensor]
) -> None:
    odd, even = weight(1).requires_grad_(), weight(1).contiguous().requires_grad_()
    for param in (odd, even):
        optimizer = subject([param], hyper=HYPER)
        for seed in (2, 3):
            param.grad = gradient(seed) if param is odd else gradient(seed).contiguous()
            optimizer.step()
    assert bits(odd.detach()) == bits(even.detach())
    assert odd.stride() == weight(1).stride()


@COUNTED
def test_state_is_made_once_with_fp32_moments_and_an_integer_counter(subject: Subject) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        param = Parameter(moderate(4, 1, dtype))
        optimizer, seen = subject([param], hyper=HYPER), set()
        for seed in range(3):
            fill([param], seed)
            optimizer.step()
            held = optimizer.state[param]
            seen.add((param.data_ptr(), *(tensor.data_ptr() for tensor in held.values())))
            assert "step" not in optimizer.param_groups[0]
        assert len(seen) == 1
        assert {name: tensor.dtype for name, tensor in held.items()} == {
            "step": torch.int64,
            "exp_avg": torch.float32,
            "exp_avg_sq": torch.float32,
        }
