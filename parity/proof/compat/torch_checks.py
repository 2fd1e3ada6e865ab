"""Checks that torch's `test_optim` runs on every input of its table, written anew."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from twinstep.parity.proof.compat.cases import Differs, Side, expect

Options = Mapping[str, object]


def _made(side: Side, options: Options) -> tuple[list[Parameter], Any]:
    torch.manual_seed(0)
    params = [Parameter(torch.randn(2, 3)), Parameter(torch.randn(3))]
    return params, side.adam(params, **options)


def _loss(params: list[Parameter]) -> Tensor:
    """Sum of (W x + b)^2, of a fixed x."""
    weight, bias = params
    return ((torch.tensor([0.5, -1.0]) @ weight + bias) ** 2).sum()


def _stepped(params: list[Parameter], optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(_loss(params))
        optimizer.step()


def _same(one: list[Parameter], two: list[Parameter]) -> None:
    if not all(torch.equal(a, b) for a, b in zip(one, two, strict=True)):
        raise Differs(f"weights are {one}, but should be {two}")


def forloop_goes_right_direction(options: Options, side: Side) -> None:
    """Twenty steps make the loss smaller."""
    params, optimizer = _made(side, options)
    before = _loss(params).item()
    _stepped(params, optimizer, 20)
    expect(_loss(params).item() < before, True, "the loss being smaller")


def with_lrscheduler_goes_right_direction(options: Options, side: Side) -> None:
    """The same under a schedule that multiplies the rate."""
    params, optimizer = _made(side, options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    before = _loss(params).item()
    for _ in range(10):
        _stepped(params, optimizer)
        schedule.step()
    expect(_loss(params).item() < before, True, "the loss being smaller")


def tensor_lr(options: Options, side: Side) -> None:
    """A rate in a tensor steps like the same number."""
    params, optimizer = _made(side, {**options, "lr": 0.01})
    others, other = _made(side, {**options, "lr": torch.tensor(0.01)})
    for _ in range(3):
        _stepped(params, optimizer)
        _stepped(others, other)
    _same(params, others)


def param_groups_lr(options: Options, side: Side) -> None:
    """A group with a rate of 0 stays, the other moves."""
    params, _ = _made(side, options)
    start = copy.deepcopy(params)
    optimizer = side.adam([{"params": params[:1], "lr": 0.0}, {"params": params[1:]}], **options)
    _stepped(params, optimizer, 3)
    _same(params[:1], start[:1])
    expect(bool(torch.equal(params[1], start[1])), False, "the other group standing still")


def param_groups_weight_decay(options: Options, side: Side) -> None:
    """Decay of one group alone changes that group alone."""
    ends = []
    for decay in (0.0, 0.5):
        params, _ = _made(side, options)
        groups = [{"params": params[:1], "weight_decay": decay}, {"params": params[1:]}]
        optimizer = side.adam(groups, **options)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        ends.append(params)
    _same(ends[0][1:], ends[1][1:])
    expect(bool(torch.equal(ends[0][0], ends[1][0])), False, "decay doing nothing")


def state_dict_deterministic(options: Options, side: Side) -> None:
    """A run that is resumed from a state goes on as it would have."""
    params, optimizer = _made(side, options)
    _stepped(params, optimizer, 4)
    others = copy.deepcopy(params)
    other = side.adam(others, **options)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _stepped(params, optimizer, 4)
    _stepped(others, other, 4)
    _same(params, others)


def save_load_equality_with_weights_only(options: Options, side: Side) -> None:
    """A state goes through a file that is read without running code."""
    params, optimizer = _made(side, options)
    _stepped(params, optimizer, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    others = copy.deepcopy(params)
    other = side.adam(others, **options)
    other.load_state_dict(state)
    _stepped(params, optimizer)
    _stepped(others, other)
    _same(params, others)


def load_nontensor_step(options: Options, side: Side) -> None:
    """A counter that is a plain number is taken."""
    params, optimizer = _made(side, options)
    _stepped(params, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    for held in state["state"].values():
        held["step"] = float(held["step"])
    others = copy.deepcopy(params)
    other = side.adam(others, **options)
    other.load_state_dict(state)
    _stepped(params, optimizer)
    _stepped(others, other)
    _same(params, others)


def deepcopy_copies_all_public_attrs(options: Options, side: Side) -> None:
    """A copy has every public attribute."""
    _, optimizer = _made(side, options)
    public = {name for name in vars(optimizer) if not name.startswith("_")}
    copied = copy.deepcopy(optimizer)
    expect({name for name in vars(copied) if not name.startswith("_")}, public, "attributes")


def pickled_goes_on(options: Options, side: Side) -> None:
    """An optimizer that was pickled with its parameters goes on alike."""
    params, optimizer = _made(side, options)
    _stepped(params, optimizer, 2)
    others, other = pickle.loads(pickle.dumps((params, optimizer)))
    _stepped(params, optimizer)
    _stepped(others, other)
    _same(params, others)


def can_be_printed(options: Options, side: Side) -> None:
    """`repr` names class and options."""
    _, optimizer = _made(side, options)
    expect("lr:" in repr(optimizer), True, "lr in repr")


def step_is_noop_when_params_have_no_grad(options: Options, side: Side) -> None:
    """Without gradients nothing moves and nothing is kept."""
    params, optimizer = _made(side, options)
    start = copy.deepcopy(params)
    optimizer.step()
    _same(params, start)
    expect(len(optimizer.state), 0, "state")


def step_is_noop_for_zero_grads(options: Options, side: Side) -> None:
    """Gradients of zero move nothing but what decays."""
    params, optimizer = _made(side, {**options, "weight_decay": 0.0})
    start = copy.deepcopy(params)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    _same(params, start)


def empty_grad(options: Options, side: Side) -> None:
    """An empty parameter is stepped beside others."""
    params, _ = _made(side, options)
    empty = Parameter(torch.empty(0, 1))
    optimizer = side.adam([empty, *params], **options)
    empty.grad = torch.empty(0, 1)
    torch.autograd.backward(_loss(params))
    optimizer.step()
    others, other = _made(side, options)
    _stepped(others, other)
    _same(params, others)


def hooks_are_called_in_order(options: Options, side: Side) -> None:
    """Hooks of step, state_dict and load_state_dict, each once."""
    params, optimizer = _made(side, options)
    seen: list[str] = []
    for name in (
        *("step_pre_hook", "step_post_hook", "state_dict_pre_hook", "state_dict_post_hook"),
        *("load_state_dict_pre_hook", "load_state_dict_post_hook"),
    ):
        register: Callable[[Callable[..., None]], object] = getattr(optimizer, f"register_{name}")
        register(lambda *_, name=name: seen.append(name))
    _stepped(params, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    wanted = ["step_pre_hook", "step_post_hook", "state_dict_pre_hook", "state_dict_post_hook"]
    expect(seen, [*wanted, "load_state_dict_pre_hook", "load_state_dict_post_hook"], "hooks")


def state_is_not_empty(options: Options, side: Side) -> None:
    """Every parameter that stepped has state."""
    params, optimizer = _made(side, options)
    _stepped(params, optimizer)
    expect([len(optimizer.state[param]) > 0 for param in params], [True, True], "state")


CHECKS: tuple[Callable[[Options, Side], None], ...] = (
    forloop_goes_right_direction,
    with_lrscheduler_goes_right_direction,
    tensor_lr,
    param_groups_lr,
    param_groups_weight_decay,
    state_dict_deterministic,
    save_load_equality_with_weights_only,
    load_nontensor_step,
    deepcopy_copies_all_public_attrs,
    pickled_goes_on,
    can_be_printed,
    step_is_noop_when_params_have_no_grad,
    step_is_noop_for_zero_grads,
    empty_grad,
    hooks_are_called_in_order,
    state_is_not_empty,
)
