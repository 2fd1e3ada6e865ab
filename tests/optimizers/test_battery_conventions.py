"""Conventions of torch, apex and DeepSpeed, kept by every class or refused in a sentence."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from tests.helpers.battery import (
    EVERY,
    PLAINS,
    WRAPPED,
    Subject,
    fill,
    observed,
)
from tests.helpers.sides import CLASSES, SIDES
from tests.helpers.small_models import ARGUMENTS, FP16, model_and, train

pytestmark = pytest.mark.usefixtures("replay")


@PLAINS
def test_the_learning_rate_is_the_second_argument(subject: Subject) -> None:
    optimizer = CLASSES[subject.side][subject.name](subject.parameters(2), 0.25)
    assert optimizer.param_groups[0]["lr"] == 0.25


@PLAINS
def test_keywords_of_torch_that_choose_a_way_are_taken_and_change_nothing(subject: Subject) -> None:
    found = []
    for options in ({}, {"foreach": True, "capturable": True}, {"fused": True, "maximize": False}):
        params = subject.parameters(3)
        optimizer = subject(params, differentiable=False, **options)
        fill(params, 1)
        optimizer.step()
        found.append(observed(optimizer, params))
    assert found[0] == found[1] == found[2]


@PLAINS
@pytest.mark.parametrize("name", ["amsgrad", "maximize", "differentiable"])
def test_keywords_of_torch_that_change_a_step_are_refused_in_a_group_too(
    subject: Subject, name: str
) -> None:
    with pytest.raises(RuntimeError, match=f"{name}=True, but should be False: .*{subject.name}"):
        subject(subject.parameters(2), **{name: True})
    with pytest.raises(RuntimeError, match=f"{name}=True, but should be False"):
        subject([{"params": subject.parameters(2), name: True}])
    with pytest.raises(RuntimeError, match="cannot be `True` together"):
        subject(subject.parameters(2), fused=True, foreach=True)


@pytest.mark.parametrize("side", SIDES)
def test_arguments_that_apex_took_in_a_step_are_refused_by_name(side: str) -> None:
    optimizer = Subject(side, "FusedAdam")(Subject(side, "FusedAdam").parameters(2))
    with pytest.raises(RuntimeError, match="scale was given, but should not be"):
        optimizer.step(scale=2.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'gradients'"):
        optimizer.step(gradients=[])


@pytest.mark.parametrize("side", SIDES)
def test_keywords_of_the_lamb_of_apex_are_refused_by_name(side: str) -> None:
    subject = Subject(side, "FusedLamb")
    for name in ("use_nvlamb", "grad_averaging", "adam_w_mode", "set_grad_none"):
        says = f"{name} was given.* DeepSpeed's LAMB, and apex's with NVLAMB is FusedLAMB"
        with pytest.raises(RuntimeError, match=says):
            subject(subject.parameters(2), **{name: False})


def stepped(kind: type[torch.optim.Optimizer], **options: Any) -> dict[str, Any]:
    """State of an optimizer of torch that has taken two steps."""
    param = Parameter(torch.ones(3))
    optimizer: Any = kind([param], lr=0.125, **options)  # type: ignore[call-arg]
    for _ in range(2):
        param.grad = torch.tensor([1.0, 2.0, 3.0])
        optimizer.step()
    state: dict[str, Any] = optimizer.state_dict()
    return state


@pytest.mark.parametrize("side", SIDES)
def test_a_state_of_torch_goes_on(side: str) -> None:
    saved = stepped(torch.optim.AdamW)
    params = [Parameter(torch.ones(3))]
    optimizer = CLASSES[side]["FusedAdam"](params)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert optimizer.param_groups[0]["weight_decay"] == 0.01
    params[0].grad = torch.ones(3)
    optimizer.step()
    assert int(optimizer.state[params[0]]["step"]) == 3


@pytest.mark.parametrize(
    ("side", "wrapped"), [("torch", False), *((side, on) for side in SIDES for on in (False, True))]
)
def test_what_is_no_option_is_gone_after_a_load_without_it(side: str, wrapped: bool) -> None:
    params = [Parameter(torch.ones(3))]
    optimizer: Any = torch.optim.AdamW(params) if side == "torch" else None
    if optimizer is None:
        optimizer = CLASSES[side]["FusedAdam"](params)
    if wrapped:
        optimizer = CLASSES[side]["FP16Optimizer"](optimizer)
    saved = optimizer.state_dict()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert "initial_lr" in optimizer.param_groups[0]
    optimizer.load_state_dict(saved)
    assert "initial_lr" not in optimizer.param_groups[0]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (stepped(torch.optim.AdamW, amsgrad=True), "amsgrad=True, but should be False"),
        (stepped(torch.optim.AdamW, maximize=True), "maximize=True, but should be False"),
        (stepped(torch.optim.Adam, weight_decay=0.1), "decoupled_weight_decay=False, but should"),
        (stepped(torch.optim.SGD), "state has no betas, eps, but FusedAdam should"),
        ({}, "a state and param_groups should be there"),
    ],
    ids=["amsgrad", "maximize", "L2", "SGD", "none"],
)
def test_a_state_that_another_step_made_is_refused_when_it_is_loaded(
    side: str, saved: dict[str, Any], message: str
) -> None:
    params = [Parameter(torch.ones(3))]
    optimizer = CLASSES[side]["FusedAdam"](params)
    before = observed(optimizer, params)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert observed(optimizer, params) == before


@pytest.mark.parametrize("side", SIDES)
def test_a_state_of_apex_has_one_counter_for_each_group(side: str) -> None:
    group = {"lr": 0.5, "bias_correction": True, "betas": (0.9, 0.99), "eps": 1e-8}
    group |= {"weight_decay": 0.0, "step": 7, "params": [0, 1]}
    moments = {"exp_avg": torch.ones(2), "exp_avg_sq": torch.full((2,), 4.0)}
    params = [Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = CLASSES[side]["FusedAdam"](params)
    optimizer.load_state_dict({"state": {0: moments, 1: moments}, "param_groups": [group]})
    assert [int(optimizer.state[param]["step"]) for param in params] == [7, 7]
    assert "step" not in optimizer.param_groups[0]


@pytest.mark.parametrize("side", SIDES)
def test_a_state_of_ours_goes_on_in_torch(side: str) -> None:
    params = [Parameter(torch.ones(3))]
    optimizer = CLASSES[side]["FusedAdam"](params, 0.1)
    fill(params, 1)
    optimizer.step()
    torchs = torch.optim.AdamW(params)
    torchs.load_state_dict(optimizer.state_dict())
    fill(params, 2)
    torchs.step()
    assert float(torchs.state[params[0]]["step"]) == 2.0


@EVERY
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_goes_on_alone_with_the_same_bits(subject: Subject, way: str) -> None:
    model, optimizer = model_and(subject)
    both = (model, optimizer)
    twin, other = copy.deepcopy(both) if way == "deepcopy" else pickle.loads(pickle.dumps(both))
    before = [param.detach().clone() for param in twin.parameters()]
    train(model, optimizer)
    assert all(map(torch.equal, before, twin.parameters()))
    train(twin, other)
    ours, theirs = (
        observed(o, list(m.parameters())) for m, o in ((model, optimizer), (twin, other))
    )
    assert ours == theirs


@WRAPPED
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_has_masters_of_what_was_frozen_since(subject: Subject, way: str) -> None:
    model, optimizer = model_and(subject)
    model.weight.requires_grad_(False)
    both = (model, optimizer)
    twin, other = copy.deepcopy(both) if way == "deepcopy" else pickle.loads(pickle.dumps(both))
    assert not twin.weight.requires_grad
    for each in (model, twin):
        each.weight.requires_grad_()
    train(model, optimizer)
    train(twin, other)
    ours, theirs = (
        observed(o, list(m.parameters())) for m, o in ((model, optimizer), (twin, other))
    )
    assert ours == theirs


@pytest.mark.parametrize("side", SIDES)
def test_a_copy_keeps_what_is_accumulated(side: str) -> None:
    model, optimizer = model_and(Subject(side, "BF16Optimizer"))
    optimizer.backward(model(torch.ones(1, 3, dtype=torch.bfloat16)).float().sum())
    twin, other = copy.deepcopy((model, optimizer))
    for made in (optimizer, other):
        made.step()
    assert torch.equal(model.weight, twin.weight)


@pytest.mark.parametrize("overrides", [False, True])
@WRAPPED
def test_hooks_of_state_dicts_are_called_and_may_change_them(
    subject: Subject, overrides: bool
) -> None:
    _, optimizer = model_and(subject)
    if overrides:
        plain: Any = type(optimizer)

        class Logged(plain):  # type: ignore[misc]
            def state_dict(self, **options: Any) -> Any:
                return super().state_dict(**options)

            def load_state_dict(self, *given: Any, **options: Any) -> None:
                super().load_state_dict(*given, **options)

        optimizer.__class__ = Logged
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("saving"))
    optimizer.register_state_dict_post_hook(lambda _, found: found | {"more": 1})
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))

    def without(_: object, given: Any) -> Any:
        calls.append(f"more={given['more']}")
        return {name: value for name, value in given.items() if name != "more"}

    optimizer.register_load_state_dict_pre_hook(without)
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["saving", "more=1", "loaded"]


@pytest.mark.parametrize("side", SIDES)
def test_bf16_refuses_to_step_over_gradients_that_nothing_accumulated(side: str) -> None:
    model, optimizer = model_and(Subject(side, "BF16Optimizer"))
    before = observed(optimizer, list(model.parameters()))["weights"]
    loss = model(torch.ones(1, 3, dtype=torch.bfloat16)).float().sum()
    loss.backward()
    with pytest.raises(
        RuntimeError, match=r"none was accumulated: call optimizer.backward\(loss\)"
    ):
        optimizer.step()
    assert observed(optimizer, list(model.parameters()))["weights"] == before
    optimizer.update_hp_grads()
    optimizer.step()
    optimizer.step()  # gradients that were accumulated once are no mistake
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


@pytest.mark.parametrize("side", SIDES)
def test_bf16_takes_any_backward_with_immediate_updates(side: str) -> None:
    """Trainers call loss.backward() themselves."""
    ends = []
    for own in (True, False):
        model, optimizer = model_and(Subject(side, "BF16Optimizer"), immediate_grad_update=True)
        before = [param.detach().clone() for param in model.parameters()]
        for _ in range(2):
            loss = model(torch.ones(1, 3, dtype=torch.bfloat16)).float().sum()
            optimizer.backward(loss) if own else loss.backward()
        optimizer.step()
        ends.append([param.detach().clone() for param in model.parameters()])
        assert not any(map(torch.equal, before, ends[-1]))
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", FP16)
@pytest.mark.parametrize("mistake", ["loss.backward", "clip by hand", "none"])
def test_fp16_says_once_that_gradients_are_not_those_of_its_backward(
    side: str, name: str, mistake: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = model_and(Subject(side, name), verbose=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 3, dtype=torch.float16)).float().sum()
            loss.backward() if mistake == "loss.backward" else optimizer.backward(loss)
            if mistake == "clip by hand":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (mistake != "none")
    assert all("not as optimizer.backward(loss) left them" in line for line in said)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("taken", ["step", "reduce_gradients", "fill_grad_accum_attribute"])
@pytest.mark.parametrize("own", [True, False])
def test_zero_says_once_that_gradients_are_not_those_of_its_backward(
    side: str, stage: int, taken: str, own: bool, caplog: pytest.LogCaptureFixture
) -> None:
    scale = {"static_loss_scale": 8.0, "partition_grads": stage == 2}
    model, optimizer = half_zero(side, scale)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            for _ in range(2):
                loss = model(torch.ones(1, 3, dtype=torch.float16)).float().sum()
                optimizer.backward(loss) if own else loss.backward()
                if taken != "step":
                    getattr(optimizer, taken)()
            optimizer.step()
            optimizer.zero_grad()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (not own)
    assert all("not as optimizer.backward(loss) left them" in line for line in said)
    assert all("[ZeroOptimizer.step, said once]" in line for line in said)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("options", [{}, {"static_loss_scale": 8.0, "verbose": False}])
def test_zero_says_nothing_of_gradients_where_the_scale_is_1_or_it_is_not_to(
    side: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = half_zero(side, options)
    with caplog.at_level(logging.WARNING):
        model(torch.ones(1, 3, dtype=torch.float16)).float().sum().backward()
        optimizer.step()
    assert not caplog.records


def half_zero(side: str, options: dict[str, Any]) -> tuple[nn.Module, Any]:
    """An fp16 model and its ZeroOptimizer on one rank."""
    model = nn.Linear(3, 2).half()
    names = {param: name for name, param in model.named_parameters()}
    inside = CLASSES[side]["FusedAdam"](model.parameters())
    return model, CLASSES[side]["ZeroOptimizer"](inside, param_names=names, **options)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", FP16)
def test_arguments_of_a_loss_scale_that_do_nothing_are_named(
    side: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    subject = Subject(side, name)
    options: dict[str, Any] = {"dynamic_loss_scale": True}
    with pytest.raises(ValueError, match="has windows, but should have init_scale, scale_window"):
        subject(subject.parameters(2), dynamic_loss_args=ARGUMENTS | {"windows": 1}, **options)
    with caplog.at_level(logging.WARNING):
        subject(
            subject.parameters(2), dynamic_loss_args=ARGUMENTS | {"delayed_shift": 1}, **options
        )
        assert not caplog.records
        subject(
            subject.parameters(2), dynamic_loss_args=ARGUMENTS | {"delayed_shift": 2}, **options
        )
        subject(subject.parameters(2), static_loss_scale=8.0, **options)
        subject(subject.parameters(2), dynamic_loss_args=ARGUMENTS)
    assert "delayed_shift=2, which changes nothing" in caplog.messages[0]
    assert caplog.messages[1:] == [
        "static_loss_scale=8.0 changes nothing with dynamic_loss_scale=True",
        "dynamic_loss_args changes nothing without dynamic_loss_scale=True",
    ]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", [*FP16, "ZeroOptimizer"])
def test_arguments_of_a_loss_scale_are_named_where_no_loss_is_scaled(
    side: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def made(**options: Any) -> list[str]:
        caplog.clear()
        weight = Parameter(torch.ones(2, dtype=torch.bfloat16))
        low = {"low_precision_dtype": torch.bfloat16}
        own = {"param_names": {weight: "weight"}} if name == "ZeroOptimizer" else low
        CLASSES[side][name](CLASSES[side]["FusedAdam"]([weight]), **own, **options)
        return [message.split()[0] for message in caplog.messages]

    with caplog.at_level(logging.WARNING):
        assert made() == []
        assert made(static_loss_scale=8.0) == ["static_loss_scale"]
        both = made(dynamic_loss_scale=True, dynamic_loss_args=ARGUMENTS)
        assert both == ["dynamic_loss_scale", "dynamic_loss_args"]


@pytest.mark.parametrize("side", SIDES)
def test_zero_names_arguments_of_a_loss_scale_that_do_nothing(
    side: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        half_zero(side, {"dynamic_loss_scale": True, "dynamic_loss_args": ARGUMENTS})
        half_zero(side, {"static_loss_scale": 8.0})
        assert not caplog.records
        half_zero(side, {"dynamic_loss_scale": True, "static_loss_scale": 8.0})
        half_zero(side, {"dynamic_loss_args": ARGUMENTS})
    assert caplog.messages == [
        "static_loss_scale=8.0 changes nothing with dynamic_loss_scale=True",
        "dynamic_loss_args changes nothing without dynamic_loss_scale=True",
    ]
