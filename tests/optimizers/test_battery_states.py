"""FusedAdam and FusedLamb of both sides with torch's own tools: copies, state dicts, schedulers."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import lr_scheduler

from tests.helpers.battery import (
    COUNTED,
    HYPER,
    PLAINS,
    Subject,
    fill,
    observed,
    parameters,
    steps_of,
)
from tests.helpers.sides import COUNTING, SIDES
from twinstep.parity.cases.fixed_inputs import bits, moderate

pytestmark = pytest.mark.usefixtures("replay")

SIDED = pytest.mark.parametrize("side", SIDES)


def started(subject: Subject, steps: int = 1, **options: Any) -> tuple[Any, list[Parameter]]:
    """An optimizer over the three dtypes, and what it steps."""
    params = parameters((6, 6, 6), None)
    optimizer = subject(params, **HYPER, **options)
    train(optimizer, params, range(steps))
    return optimizer, params


def train(optimizer: Any, params: list[Parameter], seeds: range) -> None:
    for seed in seeds:
        fill(params, seed)
        optimizer.step()


OPTIONS = {
    "FusedAdam": {"adam_w_mode": False, "set_grad_none": False},
    "FusedLamb": {"eps_inside_sqrt": True},
    "FusedLAMB": {"adam_w_mode": False, "set_grad_none": False, "use_nvlamb": True},
}


@PLAINS
@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))],
    ids=["deepcopy", "pickle"],
)
def test_copies_go_on_with_the_options_of_the_instance(
    subject: Subject, duplicate: Callable[[Any], Any]
) -> None:
    options = OPTIONS[subject.name]
    upstream = {"compat": {"shared_step_counter": True, "moments_in_param_dtype": True}}
    first, params = started(subject, 2, **options, **upstream if subject.name in COUNTING else {})
    second = duplicate(first)
    assert {name: getattr(second, name) for name in options} == options
    assert getattr(second, "compat", None) == getattr(first, "compat", None)
    copies = second.param_groups[0]["params"]
    for param in params:
        param.grad = None
    for param in copies:
        param.grad = None
    assert observed(second, copies) == observed(first, params)
    train(first, params, range(2, 4))
    train(second, copies, range(2, 4))
    assert observed(second, copies) == observed(first, params)


@PLAINS
def test_loading_copies_so_that_later_steps_leave_the_dict_alone(subject: Subject) -> None:
    first, params = started(subject)
    saved = copy.deepcopy(first.state_dict())
    before = pickle.dumps(saved)
    first.load_state_dict(saved)
    train(first, params, range(1, 3))
    assert pickle.dumps(saved) == before


@PLAINS
def test_a_state_without_steps_can_be_loaded(subject: Subject) -> None:
    fresh, _ = started(subject, 0)
    second, _ = started(subject, 0, eps=0.25)
    second.load_state_dict(fresh.state_dict())
    assert second.param_groups[0]["eps"] == fresh.param_groups[0]["eps"] != 0.25
    assert not second.state


@COUNTED
def test_making_states_ahead_changes_no_value(subject: Subject) -> None:
    first, params = started(subject, 0)
    before = [bits(param.detach()) for param in params]
    first.initialize_states()
    assert [bits(param.detach()) for param in params] == before
    assert [first.state[param]["step"].item() for param in params] == [0, 0, 0]


@SIDED
@pytest.mark.parametrize("theirs", [torch.optim.Adam, torch.optim.AdamW])
def test_the_state_of_torchs_adam_can_be_loaded(side: str, theirs: Any) -> None:
    params = [Parameter(torch.ones(3)) for _ in range(2)]
    adam = theirs([params[0]], lr=0.1)
    params[0].grad = torch.tensor([1.0, -2.0, 0.5])
    adam.step()
    optimizer = Subject(side, "FusedAdam")([params[1]])
    optimizer.load_state_dict({**adam.state_dict()})
    held = optimizer.state[params[1]]
    assert (held["step"].item(), held["step"].dtype) == (1, torch.int64)
    assert bits(held["exp_avg"]) == bits(adam.state[params[0]]["exp_avg"])


@PLAINS
def test_torchs_own_loading_would_round_the_moments(subject: Subject) -> None:
    """The reason for our own: 1e-9 as a second moment of an fp16 parameter becomes 0."""
    param = Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = subject([param])
    param.grad = torch.full((1,), 2.0**-10, dtype=torch.float16)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    torch.optim.Optimizer.load_state_dict(optimizer, saved)
    assert optimizer.state[param]["exp_avg_sq"].item() == 0.0
    optimizer.load_state_dict(saved)
    assert optimizer.state[param]["exp_avg_sq"].item() > 0.0
    kinds = {name: tensor.dtype for name, tensor in optimizer.state[param].items()}
    assert kinds.pop("step", torch.int64) == torch.int64
    assert kinds == {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}


@PLAINS
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("step", torch.tensor(1.5), r"step=1\.5, but should be a whole number of steps"),
        ("step", 1.5, r"step=1\.5, but should be a whole number of steps"),
        ("step", -1.0, r"step=-1\.0, but should be a whole number of steps"),
        ("exp_avg", torch.zeros(7), r"exp_avg has shape \(7,\), but should have \(6,\)"),
        ("exp_avg_sq", None, "state has no exp_avg_sq, but should"),
    ],
    ids=str,
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    subject: Subject, name: str, value: object, message: str
) -> None:
    first, params = started(subject)
    before = observed(first, params)
    saved = copy.deepcopy(first.state_dict())
    held = saved["state"][2] if name in saved["state"][2] else saved["param_groups"][0]
    held[name] = value
    if value is None:
        del held[name]
    with pytest.raises(ValueError, match=message):
        first.load_state_dict({**saved, "param_groups": [{**saved["param_groups"][0], "lr": 9.0}]})
    assert observed(first, params) == before
    with pytest.raises(ValueError, match="size of optimizer's group"):
        first.load_state_dict(subject(parameters((6, 6), None)).state_dict())
    assert observed(first, params) == before
    first.load_state_dict(first.state_dict())
    assert observed(first, params) == before


@PLAINS
def test_hooks_of_the_user_see_and_change_what_is_loaded(subject: Subject) -> None:
    first, _ = started(subject)
    second, _ = started(subject)
    seen: list[torch.dtype] = []

    def halve(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        changed = copy.deepcopy(given)
        for state in changed["state"].values():
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


Schedule = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
SCHEDULES: dict[str, Schedule] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=9),
    "cyclic": lambda o: lr_scheduler.CyclicLR(
        o, base_lr=0.001, max_lr=0.1, step_size_up=2, base_momentum=0.8, max_momentum=0.95
    ),
}


@SIDED
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_schedulers_drive_adam_like_torchs(side: str, name: str) -> None:
    """Same schedule, same betas: ours follows AdamW in float64 to fp32 accuracy."""
    ours, theirs = Parameter(torch.ones(4)), Parameter(torch.ones(4, dtype=torch.float64))
    adamw = torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1)
    optimizers = (Subject(side, "FusedAdam")([ours], lr=0.01, weight_decay=0.1), adamw)
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


@SIDED
def test_a_learning_rate_tensor_is_driven_in_place(side: str) -> None:
    lr = torch.tensor(0.5, dtype=torch.float64)
    param = Parameter(torch.ones(1))
    optimizer = Subject(side, "FusedAdam")([param], lr=lr, eps=0.0)
    schedule = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    param.grad = torch.ones(1)
    optimizer.step()
    schedule.step()
    assert (param.item(), lr.item()) == (0.5, 0.25)


@PLAINS
def test_hyper_parameters_may_be_tensors(subject: Subject) -> None:
    """They give the bits of numbers; what is written into one acts in the next step."""

    def tensors(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float64)

    numbers: dict[str, Any] = {"lr": 0.0123, "eps": 3e-7, "weight_decay": 0.07}
    held = {name: tensors(value) for name, value in numbers.items()}
    pairs = [(0.87, 0.993), (tensors(0.87), tensors(0.993))]
    runs = []
    for hyper, betas in zip((numbers, held), pairs, strict=True):
        params = parameters((6, 3), None)
        optimizer = subject(params, **hyper, betas=betas)
        train(optimizer, params, range(2))
        runs.append([bits(param.detach()) for param in params])
    assert runs[0] == runs[1]
    held["lr"].zero_()
    train(optimizer, params, range(2, 3))
    assert [bits(param.detach()) for param in params] == runs[1]


@PLAINS
def test_torchs_grad_scaler_takes_it(subject: Subject) -> None:
    param = Parameter(torch.ones(2))
    optimizer = subject([param], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for bad in (False, True):
        optimizer.zero_grad()
        scaler.scale((param * (torch.inf if bad else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert steps_of(optimizer, param) == 1


@SIDED
def test_a_bf16_wrapper_that_is_dropped_is_freed(side: str) -> None:
    """Hooks of parameters are a way round that the garbage collector does not see."""
    param = Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = Subject(side, "BF16Optimizer")([param], immediate_grad_update=True)
    param.sum().backward()
    assert param.grad is None
    held: list[weakref.ref[Any]] = [weakref.ref(optimizer), weakref.ref(param)]
    del optimizer, param
    gc.collect()
    assert [ref() for ref in held] == [None] * 2
