"""FusedAdam with torch's own tools: schedulers, torch.save, load_state_dict, copies, hooks."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import lr_scheduler

from twinstep.contract.compat import Compat
from twinstep.parity.cases.fixed_inputs import bits, moderate
from twinstep.reference.optimizers.fused_adam import FusedAdam

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
StateDict = dict[str, object]


def parameters(seed: int = 0) -> list[Parameter]:
    return [Parameter(moderate(6, seed + i, dtype)) for i, dtype in enumerate(DTYPES)]


def train(optimizer: FusedAdam, seeds: range) -> None:
    for seed in seeds:
        for group in optimizer.param_groups:
            for index, p in enumerate(group["params"]):
                p.grad = moderate(6, 100 * seed + index, p.dtype)
        optimizer.step()


def observable(optimizer: FusedAdam) -> list[list[int]]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = [t for p in params for t in optimizer.state[p].values()]
    return [bits(t.detach()) for t in (*params, *state)]


def through_a_file(state: StateDict) -> StateDict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return cast(StateDict, torch.load(file, weights_only=True))


def resumed(optimizer: FusedAdam, compat: Compat) -> FusedAdam:
    """A new optimizer over copies of the parameters, loaded from a saved state."""
    old = [p for group in optimizer.param_groups for p in group["params"]]
    params = [Parameter(p.detach().clone()) for p in old]
    other = FusedAdam(params, lr=9.0, compat=compat)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    return other


@pytest.mark.parametrize("compat", [Compat(), Compat.deepspeed()], ids=["correct", "deepspeed"])
def test_a_resumed_run_equals_an_uninterrupted_one(compat: Compat) -> None:
    straight = FusedAdam(parameters(), lr=0.01, weight_decay=0.1, compat=compat)
    train(straight, range(3))
    second = resumed(straight, compat)
    assert observable(second) == observable(straight)
    for optimizer in (straight, second):
        train(optimizer, range(3, 6))
    assert observable(second) == observable(straight)


def test_loading_keeps_moments_in_fp32_and_counters_integer() -> None:
    first = FusedAdam(parameters(), lr=0.01)
    train(first, range(2))
    second = resumed(first, Compat())
    for state in second.state.values():
        kinds = [state[name].dtype for name in ("step", "exp_avg", "exp_avg_sq")]
        assert kinds == [torch.int64, torch.float32, torch.float32]


def test_torchs_own_loading_would_round_the_moments() -> None:
    """The reason for our own: 1e-9 as a second moment of an fp16 parameter becomes 0."""
    p = Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = FusedAdam([p])
    p.grad = torch.full((1,), 2.0**-10, dtype=torch.float16)
    optimizer.step()
    saved = optimizer.state_dict()
    torch.optim.Optimizer.load_state_dict(optimizer, saved)
    assert optimizer.state[p]["exp_avg_sq"].item() == 0.0
    optimizer.load_state_dict(saved)
    assert optimizer.state[p]["exp_avg_sq"].item() > 0.0


def test_loading_copies_so_that_later_steps_leave_the_dict_alone() -> None:
    first = FusedAdam(parameters(), lr=0.01)
    train(first, range(1))
    saved = copy.deepcopy(first.state_dict())
    before = pickle.dumps(saved)
    first.load_state_dict(saved)
    train(first, range(1, 3))
    assert pickle.dumps(saved) == before


def test_a_state_without_steps_can_be_loaded() -> None:
    first = FusedAdam(parameters(), lr=0.25)
    second = FusedAdam(parameters(), lr=9.0)
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["lr"] == 0.25
    assert not second.state


def test_the_state_of_torchs_adamw_can_be_loaded() -> None:
    (ours,), (theirs,) = ([Parameter(torch.ones(3))] for _ in range(2))
    adamw = torch.optim.AdamW([theirs], lr=0.1)
    theirs.grad = torch.tensor([1.0, -2.0, 0.5])
    adamw.step()
    optimizer = FusedAdam([ours])
    optimizer.load_state_dict({**adamw.state_dict()})
    assert optimizer.state[ours]["step"].item() == 1
    assert optimizer.state[ours]["step"].dtype == torch.int64
    assert bits(optimizer.state[ours]["exp_avg"]) == bits(adamw.state[theirs]["exp_avg"])


BROKEN: list[tuple[str, object, str]] = [
    ("step", 1.5, "step=1.5, but should be a whole number of steps"),
    ("step", -1.0, "step=-1.0, but should be a whole number of steps"),
    ("exp_avg", torch.zeros(7), r"exp_avg has shape \(7,\), but should have \(6,\)"),
    ("exp_avg_sq", None, "state has no exp_avg_sq, but should"),
]


@pytest.mark.parametrize(("name", "value", "message"), BROKEN, ids=str)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    name: str, value: object, message: str
) -> None:
    first = FusedAdam(parameters(), lr=0.01)
    train(first, range(1))
    before = observable(first)
    saved = copy.deepcopy(first.state_dict())
    saved["state"][2][name] = value
    if value is None:
        del saved["state"][2][name]
    with pytest.raises(ValueError, match=message):
        first.load_state_dict({**saved, "param_groups": [{**saved["param_groups"][0], "lr": 9.0}]})
    assert observable(first) == before
    assert first.param_groups[0]["lr"] == 0.01
    first.load_state_dict(first.state_dict())


def test_groups_that_do_not_match_are_refused() -> None:
    first = FusedAdam(parameters(), lr=0.01)
    train(first, range(1))
    with pytest.raises(ValueError, match="size of optimizer's group"):
        first.load_state_dict(FusedAdam(parameters()[:2]).state_dict())


def test_hooks_of_the_user_see_and_change_what_is_loaded() -> None:
    first = FusedAdam(parameters(), lr=0.01)
    train(first, range(1))
    second = FusedAdam(parameters(), lr=0.01)
    seen: list[torch.dtype] = []

    def halve(_: torch.optim.Optimizer, given: StateDict) -> StateDict:
        changed = copy.deepcopy(given)
        states = cast(dict[int, dict[str, Tensor]], changed["state"])
        for state in states.values():
            state["exp_avg"] /= 2
        return changed

    def look(optimizer: torch.optim.Optimizer) -> None:
        seen.extend(state["exp_avg"].dtype for state in optimizer.state.values())

    second.register_load_state_dict_pre_hook(halve)
    second.register_load_state_dict_post_hook(look)
    second.load_state_dict(first.state_dict())
    for a, b in zip(first.state.values(), second.state.values(), strict=True):
        assert torch.equal(a["exp_avg"] / 2, b["exp_avg"])
    assert seen == [torch.float32] * 3


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))],
    ids=["deepcopy", "pickle"],
)
def test_copies_keep_the_options_of_the_instance(
    duplicate: Callable[[FusedAdam], FusedAdam],
) -> None:
    first = FusedAdam(
        parameters(), adam_w_mode=False, set_grad_none=False, compat=Compat.deepspeed()
    )
    train(first, range(2))
    second = duplicate(first)
    assert (second.adam_w_mode, second.set_grad_none) == (False, False)
    assert second.compat == Compat.deepspeed()
    for optimizer in (first, second):
        train(optimizer, range(2, 4))
    assert observable(second) == observable(first)


Schedule = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
SCHEDULES: dict[str, Schedule] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=9),
    "cyclic": lambda o: lr_scheduler.CyclicLR(
        o, base_lr=0.001, max_lr=0.1, step_size_up=2, base_momentum=0.8, max_momentum=0.95
    ),
}


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_schedulers_drive_it_like_torchs_adamw(name: str) -> None:
    """Same schedule, same betas: ours follows AdamW in float64 to fp32 accuracy."""
    ours, theirs = Parameter(torch.ones(4)), Parameter(torch.ones(4, dtype=torch.float64))
    adamw = torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1)
    optimizers = (FusedAdam([ours], lr=0.01, weight_decay=0.1), adamw)
    schedules = [SCHEDULES[name](optimizer) for optimizer in optimizers]
    betas = set()
    for seed in range(6):
        grad = moderate(4, seed, torch.float32)
        ours.grad, theirs.grad = grad, grad.double()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        groups = [optimizer.param_groups[0] for optimizer in optimizers]
        assert groups[0]["lr"] == groups[1]["lr"]
        assert groups[0]["betas"] == groups[1]["betas"]
        betas.add(groups[0]["betas"][0])
    cycles = name in ("one_cycle", "cyclic")
    assert (len(betas) > 1) == cycles
    # Six steps of some twenty fp32 roundings each, of numbers of magnitude at most 2.
    assert float((ours - theirs).detach().abs().max()) <= 6 * 20 * 2.0**-23


def test_a_learning_rate_tensor_is_driven_in_place() -> None:
    lr = torch.tensor(0.5, dtype=torch.float64)
    p = Parameter(torch.ones(1))
    optimizer = FusedAdam([p], lr=lr, eps=0.0)
    schedule = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    p.grad = torch.ones(1)
    optimizer.step()
    schedule.step()
    assert (p.item(), lr.item()) == (0.5, 0.25)


def test_step_hooks_and_gradscaler_work() -> None:
    p = Parameter(torch.ones(2))
    optimizer = FusedAdam([p], lr=0.1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for bad in (False, True):
        optimizer.zero_grad()
        scaler.scale((p * (torch.inf if bad else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert calls == ["before", "after"]
    assert optimizer.state[p]["step"].item() == 1
