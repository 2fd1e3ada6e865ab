"""A step does little on the host: what it costs for each tensor, and what it must still notice."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.helpers.battery import HYPER, Subject, advance, fill, observed, parameters
from twinstep.benchmarks.host import CASES, idle_launches
from twinstep.benchmarks.host import Subject as Timed
from twinstep.fast import FP16UnfusedOptimizer, FusedAdam, FusedLamb
from twinstep.fast.optimizers import driver
from twinstep.fast.runtime import checks, reader, watch
from twinstep.fast.runtime.tables import TableCache
from twinstep.replay import launches

WRAPPERS = ("FP16Optimizer", "FP16UnfusedOptimizer", "BF16Optimizer")
PLANNED = ("FusedAdam", *WRAPPERS, "FusedLamb")
# Bytecodes of a step for each tensor, where C++ reads lists and where Python does.
BYTECODES = {True: dict.fromkeys(PLANNED, 0.5), False: dict.fromkeys(PLANNED, 2.0)}
# Python's loops over gradients that are dropped, or noted for the next backward.
BYTECODES[False] |= {"FP16Optimizer": 12.0, "FP16UnfusedOptimizer": 24.0}
ONCE = {True: 2600, False: 3300}


def bytecodes(name: str, count: int) -> int:
    """Bytecodes of Python that one step executes, once it has settled, with new gradients."""
    subject = Timed(name, count)
    for _ in range(3):
        subject.prepare()
        subject.step()
    subject.prepare()
    seen = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal seen
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        seen += event == "opcode"
        return trace

    before = sys.gettrace()
    # Python 3.12 looks for a frame that asks for it when tracing begins.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        subject.optimizer.step()
    finally:
        sys.settrace(before)
    return seen


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", PLANNED)
def test_a_step_takes_few_bytecodes_for_each_tensor(
    name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop of Python over the tensors takes dozens; what runs in C takes none."""
    assert name in CASES
    if not compiled:
        monkeypatch.setattr(reader, "library", lambda: None)
        monkeypatch.setattr(watch, "library", lambda: None)
    with idle_launches():
        few, many = bytecodes(name, 64), bytecodes(name, 320)
    assert (many - few) / 256 <= BYTECODES[compiled][name]
    assert few <= ONCE[compiled]


@pytest.mark.parametrize("name", PLANNED)
def test_gradients_that_move_build_no_table(name: str, replay: object) -> None:
    subject = Subject("fast", name)
    params = subject.parameters(70, (3, 10), 5)
    optimizer = subject(params, hyper=HYPER)
    cache: TableCache = getattr(optimizer, "_cache", None) or optimizer._step.cache
    built = []
    for seed in range(4):
        fill(params, seed)
        advance(optimizer)
        observed(optimizer, params)  # state appears when it is asked for, and lists are laid out
        built.append(cache.built)
    assert built[1:] == [built[1]] * 3


Change = Callable[[Any, list[Parameter]], object]


def _kept(optimizer: Any, param: Tensor) -> dict[str, Tensor]:
    """State of a parameter or of the master that it is part of."""
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    found: dict[str, Tensor] = optimizer.state[masters[-1] if param is None else masters[0]]
    return found


def _replace_moment(optimizer: Any, params: list[Parameter]) -> None:
    held = _kept(optimizer, params[0])
    held["exp_avg"] = held["exp_avg"].clone().mul_(0.5)


def _move_moments(optimizer: Any, params: list[Parameter]) -> None:
    for held in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            held[name].data = held[name].data.clone().mul_(0.5)


def _move_one_moment(optimizer: Any, params: list[Parameter]) -> None:
    held = list(optimizer.state.values())[-1]
    held["exp_avg_sq"].data = held["exp_avg_sq"].data.clone().mul_(0.5)


def _replace_counter(optimizer: Any, params: list[Parameter]) -> None:
    held = _kept(optimizer, params[0])
    held["step"] = held["step"].clone().add_(3)


def _forget_state(optimizer: Any, params: list[Parameter]) -> None:
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    optimizer.state.pop(masters[0])


def _new_data(optimizer: Any, params: list[Parameter]) -> None:
    params[0].data = params[0].data.clone().mul_(2.0)


def _other_groups(optimizer: Any, params: list[Parameter]) -> None:
    first, second = optimizer.param_groups
    first["lr"], second["betas"], second["bias_correction"] = 0.5, (0.5, 0.75), False


def _exchanged(optimizer: Any, params: list[Parameter]) -> None:
    first, second = optimizer.param_groups
    first["params"][0], second["params"][0] = second["params"][0], first["params"][0]


def _load(optimizer: Any, params: list[Parameter]) -> None:
    saved = optimizer.state_dict()
    optimizer.load_state_dict([saved] if hasattr(optimizer, "update_hp_grads") else saved)


ANYWHERE: dict[str, Change] = {
    "moment": _replace_moment,
    "memory of moments": _move_moments,
    "memory of one moment": _move_one_moment,
    "counter": _replace_counter,
    "state": _forget_state,
    "hyper-parameters": _other_groups,
    "load": _load,
}
PARAMETERS: dict[str, Change] = {"data": _new_data}
GROUPS: dict[str, Change] = {"exchanged": _exchanged}
GRADIENTS: dict[str, Callable[[list[Parameter]], object]] = {
    "missing": lambda params: setattr(params[1], "grad", None),
    "strided": lambda params: setattr(params[1], "grad", _crossed(params[1])),
    "elsewhere": lambda params: setattr(params[1], "grad", _beside(params[1])),
}
ROWS = [
    *((name, label) for name in PLANNED for label in ANYWHERE),
    *((name, "data") for name in ("FusedAdam", "FP16UnfusedOptimizer", "FusedLamb")),
    *((name, "exchanged") for name in ("FusedAdam", "FusedLamb")),
]


def _crossed(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad.t().contiguous().t()


def _beside(param: Tensor) -> Tensor:
    """The gradient at an address that is no multiple of 16."""
    assert param.grad is not None
    room = torch.empty(param.numel() + 1, dtype=param.dtype)
    return room[1:].view(param.shape).copy_(param.grad)


def _trained(side: str, name: str, change: Change | None, label: str) -> list[dict[str, object]]:
    subject = Subject(side, name)
    params = subject.parameters(70, (3, 10), 5, (2, 7))
    options = {"clip_grad": 0.5} if name in WRAPPERS else {}
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.05}]
    optimizer = subject(groups, hyper=HYPER, **options)
    seen = []
    for seed in range(6):
        fill(params, seed)
        if seed == 3 and change is not None:
            change(optimizer, params)
        if seed in (3, 4) and label in GRADIENTS:
            GRADIENTS[label](params)
        advance(optimizer)
        if seed != 2:
            seen.append(observed(optimizer, params))
    return seen


@pytest.mark.parametrize(("name", "label"), ROWS)
def test_what_a_caller_changes_between_steps_is_noticed(
    name: str, label: str, replay: object
) -> None:
    change = (ANYWHERE | PARAMETERS | GROUPS)[label]
    assert _trained("fast", name, change, "") == _trained("reference", name, change, "")


@pytest.mark.parametrize("label", GRADIENTS)
@pytest.mark.parametrize("name", PLANNED)
def test_gradients_of_another_kind_are_noticed(name: str, label: str, replay: object) -> None:
    assert _trained("fast", name, None, label) == _trained("reference", name, None, label)


def test_a_group_that_is_added_is_stepped(replay: object) -> None:
    def trained(side: str) -> list[dict[str, object]]:
        subject = Subject(side, "FusedAdam")
        params = subject.parameters(70, 5, 8)
        optimizer, seen = subject(params[:2], **HYPER), []
        for seed in range(4):
            if seed == 2:
                optimizer.add_param_group({"params": params[2:], "lr": 0.3})
            fill(params, seed)
            optimizer.step()
            seen.append(observed(optimizer, params))
        return seen

    assert trained("fast") == trained("reference")


@pytest.mark.parametrize("name", ["FP16Optimizer", "FP16UnfusedOptimizer"])
def test_parameters_on_two_devices_are_refused_and_nothing_changes(name: str) -> None:
    subject = Subject("fast", name)
    params = [*subject.parameters(4), Parameter(torch.zeros(3, dtype=torch.float16, device="meta"))]
    where = params[0].data_ptr()
    with pytest.raises(ValueError, match=f"^parameter 1 is on meta, .* cpu like .* \\[{name}\\]$"):
        subject(params)
    assert params[0].data_ptr() == where


@pytest.mark.parametrize("name", PLANNED)
def test_state_is_not_made_inside_a_captured_graph(
    name: str, replay: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = Subject("fast", name)
    params = subject.parameters(4)
    optimizer = subject(params)
    fill(params, 1)
    monkeypatch.setattr(checks, "is_capturing", lambda _: True)
    with pytest.raises(RuntimeError, match="state of a first step is made while a CUDA graph"):
        advance(optimizer)
    monkeypatch.undo()
    advance(optimizer)
    monkeypatch.setattr(checks, "is_capturing", lambda _: True)
    fill(params, 2)
    advance(optimizer)


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_step_that_fails_in_between_leaves_nothing_in_the_next_norm(
    name: str, replay: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = Subject("fast", name)
    params = subject.parameters(4)
    optimizer = subject(params)
    fill(params, 1)
    step = optimizer._step

    def fails(*_: object) -> None:
        raise OSError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(step, "_finalise", fails)
        patch.setattr(step, "_finalise_unscaled", fails)
        with pytest.raises(OSError, match="lost"):
            advance(optimizer)
    assert step._limbs.count_nonzero() == 0


@pytest.mark.parametrize("inside", [FusedAdam, FusedLamb])
def test_many_counters_are_advanced_in_parallel_with_the_same_bits(
    inside: type[FusedAdam] | type[FusedLamb], replay: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(serial: int) -> tuple[int, list[dict[str, object]]]:
        monkeypatch.setattr(driver, "SERIAL", serial)
        params, seen = parameters((70, 5, 3, 8), torch.float16), []
        groups: list[dict[str, object]] = [{"params": params[:3]}]
        groups.append({"params": params[3:], "betas": (0.5, 0.75)})
        optimizer = FP16UnfusedOptimizer(inside(groups), clip_grad=0.5, verbose=False)
        for seed in range(4):
            fill(params, seed)
            if seed == 2:
                params[1].grad = torch.full_like(params[1], math.inf)
            with launches() as log:
                optimizer.step()
            seen.append(observed(optimizer, params))
        return len(log), seen

    (few, expected), (many, found) = trained(driver.SERIAL), trained(2)
    assert many == few + 1
    assert found == expected
