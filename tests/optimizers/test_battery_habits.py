"""Habits of torch's users, tried with every class."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as state_dicts
from torch import Tensor
from torch.nn import Parameter

from tests.helpers.battery import (
    COUNTED,
    EVERY,
    WRAPPED,
    Subject,
    advance,
    fill,
    masters_of,
    steps_of,
)
from tests.helpers.sides import CLASSES, SIDES
from tests.helpers.small_models import FP16, model_and, train

pytestmark = pytest.mark.usefixtures("replay")
OFFLOAD = SimpleNamespace(device="cpu")


@WRAPPED
def test_the_state_dict_itself_goes_through_torch_save(subject: Subject) -> None:
    """`get_optimizer_state_dict` wants names of masters: KeyError 'state' in torch."""
    _, optimizer = model_and(subject)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    masters = [master.clone() for master in masters_of(optimizer)]
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    assert all(map(torch.equal, masters, masters_of(optimizer)))


@EVERY
def test_schedulers_and_closures(subject: Subject) -> None:
    params = subject.parameters(2)
    optimizer = subject(params)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    fill(params, 1)
    advance(optimizer)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5e-3

    def closure() -> Tensor:
        return torch.tensor(2.0)

    if subject.name.startswith("Fused"):
        assert optimizer.step(closure) == 2.0
    else:
        with pytest.raises(RuntimeError, match="closure was given"):
            optimizer.step(closure)


@WRAPPED
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_finite_gradients_whose_squares_are_past_fp32_skip_the_step(
    subject: Subject, norm_type: float
) -> None:
    """Decision 0018: the second moment would be infinite for good, and the weight dead."""
    param = Parameter(torch.ones(2, dtype=torch.bfloat16))
    options = {} if subject.name == "BF16Optimizer" else {"low_precision_dtype": torch.bfloat16}
    optimizer = subject([param], norm_type=norm_type, hyper={"lr": 0.1}, **options)
    weights, skipped = [], []
    for largest in (1.0, 3e38, 2.0**64, 2.0**63, 1.0):
        param.grad = torch.tensor([largest, 0.0], dtype=torch.bfloat16)
        advance(optimizer)
        weights.append(param[0].item())
        skipped.append(optimizer.overflow)
    assert skipped == [False, True, True, False, False]
    assert len(set(weights[1:])) == 3
    assert all(bool(held["exp_avg_sq"].isfinite().all()) for held in optimizer.state.values())


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {}),
        (torch.bfloat16, {"partition_grads": False}),
        (torch.bfloat16, {"offload_optimizer_config": OFFLOAD}),
        (torch.float32, {}),
        (torch.float32, {"check_grad_overflow": False}),
    ],
)
def test_zero_skips_the_same_steps(side: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """DeepSpeed 0.19.8 has skips and weights like these; fp32 it checks in any case."""
    param = Parameter(torch.ones(2, dtype=dtype))
    inside = CLASSES[side]["FusedAdam"]([param], lr=0.1)
    optimizer = CLASSES[side]["ZeroOptimizer"](inside, param_names={param: "p"}, **options)
    weights, skipped = [], []
    for largest in (1.0, 3e38, 2.0**64, float("nan"), 2.0**63, 1.0):
        param.grad = torch.tensor([largest, 0.0], dtype=dtype)
        optimizer.step()
        weights.append(round(param[0].item(), 4))
        skipped.append(optimizer.overflow)
    assert skipped == [False, True, True, True, False, False]
    assert len(set(weights[3:])) == 3
    assert all(bool(held["exp_avg_sq"].isfinite().all()) for held in optimizer.state.values())


@pytest.mark.parametrize("side", SIDES)
def test_names_that_users_of_deepspeed_read(side: str) -> None:
    for name in FP16:
        _, optimizer = model_and(Subject(side, name))
        assert optimizer.cur_scale == optimizer.loss_scale == 64.0
        assert (optimizer.cur_iter, optimizer.low_precision_dtype) == (1, torch.float16)
        assert optimizer._global_grad_norm == optimizer.get_global_norm() > 0.0
    _, brain = model_and(Subject(side, "BF16Optimizer"))
    assert (brain.group_paddings, brain.partition_count) == ([0], [1])
    assert brain._global_grad_norm == brain.get_global_norm() > 0.0


@COUNTED
def test_defaults_beside_those_of_torch(subject: Subject) -> None:
    optimizer = subject(subject.parameters(2))
    torchs = torch.optim.AdamW([Parameter(torch.ones(1))]).defaults
    known = torchs.keys() & optimizer.defaults.keys()
    differing = {name for name in known if optimizer.defaults[name] != torchs[name]}
    assert differing == {"weight_decay"}
    assert optimizer.defaults["weight_decay"] == 0.0
    optimizer.initialize_states()
    (state,) = optimizer.state.values()
    assert state["step"].dtype == torch.int64


@pytest.mark.parametrize("side", SIDES)
def test_tensors_among_hyper_parameters_that_torch_refuses_are_taken(side: str) -> None:
    params = [Parameter(torch.ones(2))]
    kind = CLASSES[side]["FusedAdam"]
    optimizer = kind(params, torch.tensor(0.25), betas=(0.9, torch.tensor(0.99)), foreach=True)
    fill(params, 1)
    optimizer.step()
    assert not torch.equal(params[0], torch.ones(2))


@EVERY
def test_grad_scaler_steps_plain_optimizers_and_no_wrapper(subject: Subject) -> None:
    params = subject.parameters(2)
    optimizer = subject(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(params[0].float().sum()).backward()
    if subject.name.startswith("Fused"):
        scaler.step(optimizer)
        assert steps_of(optimizer, params[0]) == 1
    else:
        before = params[0].detach().clone()
        with pytest.raises(RuntimeError, match="GradScaler steps this optimizer, but should not"):
            scaler.step(optimizer)
        assert torch.equal(params[0], before)


@EVERY
def test_averages_of_weights_follow_every_class(subject: Subject) -> None:
    model, optimizer = model_and(subject)
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    first = model.weight.detach().clone()
    train(model, optimizer)
    average.update_parameters(model)
    between = (first.double() + model.weight.detach().double()) / 2
    found, _ = average.module.parameters()
    torch.testing.assert_close(found.double(), between, rtol=1e-2, atol=1e-3)
    assert not torch.equal(found, model.weight)


@pytest.mark.parametrize("side", SIDES)
def test_a_group_without_gradients(side: str) -> None:
    hyper = {"lr": 0.5, "weight_decay": 0.5}
    for name in ("FusedAdam", *FP16, "BF16Optimizer"):
        subject = Subject(side, name)
        params = [*subject.parameters(2), *subject.parameters(2)]
        optimizer = subject([{"params": [param]} for param in params], hyper=hyper)
        before = params[1].detach().clone()
        fill(params, 1, missing=[1])
        advance(optimizer)
        assert torch.equal(params[1], before) == (name == "FusedAdam"), name


@EVERY
def test_a_compiled_loop_leaves_the_step_as_it_is(subject: Subject) -> None:
    model, optimizer = model_and(subject)
    fill(list(model.parameters()), 1)
    getattr(optimizer, "update_hp_grads", int)()

    def loop() -> None:
        optimizer.step()

    before = model.weight.detach().clone()
    torch.compile(loop, backend="eager")()
    assert not torch.equal(model.weight, before)


@WRAPPED
def test_a_step_without_backward_says_so_once(
    subject: Subject, caplog: pytest.LogCaptureFixture
) -> None:
    """It is one with zeros, as in DeepSpeed 0.19.8, where weights decay and counters move."""
    params = subject.parameters(2, 3)
    loud = {} if subject.name == "BF16Optimizer" else {"verbose": True}
    optimizer = subject(params, hyper={"weight_decay": 0.5, "lr": 0.5}, **loud)
    before = params[0].detach().clone()
    fill(params, 1, missing=[0])
    advance(optimizer)
    assert not caplog.messages
    optimizer.zero_grad()
    optimizer.step()
    optimizer.step()
    (said,) = caplog.messages
    assert "no parameter has a gradient, but some should" in said
    assert not torch.equal(params[0], before)


@WRAPPED
def test_masters_of_a_model_that_needs_none_are_named(
    subject: Subject, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a model trains all the same, as in DeepSpeed."""
    param = Parameter(torch.ones(2))
    loud = {} if subject.name == "BF16Optimizer" else {"verbose": True}
    optimizer = subject([param], hyper={"lr": 0.5}, **loud)
    (said,) = caplog.messages
    assert f"no parameter is {subject.dtype}, but some should be" in said
    optimizer.backward(param.sum())
    optimizer.step()
    assert param.tolist() == [0.5, 0.5]
    rows = [[Parameter(torch.ones(2))], subject.parameters(2)]
    subject([{"params": row} for row in rows], **loud)
    assert len(caplog.messages) == 1


@WRAPPED
@pytest.mark.parametrize("limit", [0.0, -1.0])
def test_a_negative_limit_does_not_clip(subject: Subject, limit: float) -> None:
    """As in DeepSpeed 0.19.8; torch's `clip_grad_norm_` would turn gradients around."""
    found = []
    for given in (limit, 1e9):
        params = subject.parameters(2)
        optimizer = subject(params, inside="SGD", hyper={"lr": 0.5}, clip_grad=given)
        fill(params, 1)
        advance(optimizer)
        found.append((params[0].tolist(), optimizer.get_global_norm()))
    assert found[0] == found[1]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["FusedAdam", "torch"])
def test_named_state_of_a_fresh_optimizer_is_that_of_torch(side: str, name: str) -> None:
    """Torch steps it with zeros at a rate of 0, so that counters are 1, but for states made before.

    A saved state that is loaded into it replaces them.
    """
    kind: Any = torch.optim.AdamW if name == "torch" else CLASSES[side][name]
    model = torch.nn.Linear(2, 2)
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
    before = model.weight.detach().clone()
    fresh = kind(model.parameters(), **options)
    saved: Any = state_dicts.get_optimizer_state_dict(model, fresh)
    assert torch.equal(model.weight, before)
    assert int(saved["state"]["weight"]["step"]) == steps_of(fresh, model.weight) == 1
    if name != "torch":
        made = kind(model.parameters(), **options)
        made.initialize_states()
        state_dicts.get_optimizer_state_dict(model, made)
        assert steps_of(made, model.weight) == 0
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        fresh.step()
    saved = state_dicts.get_optimizer_state_dict(model, fresh)
    other = kind(model.parameters(), **options)
    state_dicts.get_optimizer_state_dict(model, other)
    state_dicts.set_optimizer_state_dict(model, other, saved)
    assert steps_of(other, model.weight) == steps_of(fresh, model.weight) == 3
