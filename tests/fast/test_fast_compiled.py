"""Launches past Triton's own Python hand the driver what Triton would have handed it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.helpers.battery import HYPER, Subject, fill, runs_of_triton
from twinstep.fast.runtime import compiled
from twinstep.fast.runtime.dispatch import launch
from twinstep.replay.triton.launcher import Launcher

pytestmark = pytest.mark.usefixtures("replay")
SUBJECTS = ("FusedAdam", "FusedLamb", "FP16Optimizer", "FP16UnfusedOptimizer", "BF16Optimizer")
FACTOR = tl.constexpr(2)


@triton.jit
def scale_kernel(source, target, numel, limit: tl.int64, BLOCK: tl.constexpr):
    """Target = FACTOR * source."""
    at = tl.arange(0, BLOCK)
    found = tl.load(source + at, mask=at < numel)
    tl.store(target + at, FACTOR * found, mask=at < limit)


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Arguments of each launch, as the launcher gets them; tensors by address and dtype."""
    log: list[tuple[object, ...]] = []
    original = Launcher.__call__

    def watched(self: Launcher, *args: Any) -> None:
        seen = [(a.data_ptr(), a.dtype) if isinstance(a, torch.Tensor) else a for a in args]
        log.append((id(self), self.source_name, *seen[:5], *seen[9:]))
        original(self, *args)

    monkeypatch.setattr(Launcher, "__call__", watched)
    return log


def by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton make every launch."""
    monkeypatch.setattr(compiled, "surroundings", lambda _: None)


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_step_hands_over_what_triton_would(
    name: str, handed: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = Subject("fast", name)
    params = subject.parameters(5, (3, 4), 17, 40)
    optimizer = subject([{"params": params[:3]}, {"params": params[3:], "lr": 0.2}], hyper=HYPER)
    fill(params, 0)
    grads = [param.grad for param in params]

    def step() -> list[tuple[object, ...]]:
        handed.clear()
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        if name == "BF16Optimizer":
            optimizer.update_hp_grads()
        optimizer.step()
        return [tuple(map(_placeless, entry)) for entry in handed]

    for _ in range(2):
        step()
    names = runs_of_triton(monkeypatch)
    past = step()
    assert names == []
    by_triton(monkeypatch)
    assert step() == past
    assert names == [entry[1] for entry in past]


def _placeless(value: object) -> object:
    """An argument without its address: a step allocates its coefficients."""
    return value[1] if isinstance(value, tuple) else value


CASES: dict[str, Callable[[torch.Tensor], tuple[Any, ...]]] = {
    "aligned": lambda t: (t[:32], t[64:96], 32, 32),
    "source elsewhere": lambda t: (t[1:33], t[64:96], 32, 32),
    "target elsewhere": lambda t: (t[:32], t[65:97], 32, 32),
    "one": lambda t: (t[:32], t[64:96], 1, 32),
    "no multiple of 16": lambda t: (t[:32], t[64:96], 31, 32),
    "another limit": lambda t: (t[:32], t[64:96], 32, 7),
    "half": lambda t: (t.half()[:32], t[64:96], 32, 32),
    "long": lambda t: (t[:32], t[64:96], 2**40, 32),
}


@pytest.mark.parametrize("case", CASES)
def test_every_specialisation_of_triton_is_told_apart(
    case: str, handed: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = torch.arange(128.0)
    for made in CASES.values():  # whatever comes first must not decide for the others
        launch(scale_kernel, 1, memory, made(memory), warps=1, BLOCK=32)
    args = CASES[case](memory)
    handed.clear()
    launch(scale_kernel, 1, memory, args, warps=1, BLOCK=32)
    by_triton(monkeypatch)
    launch(scale_kernel, 1, memory, args, warps=1, BLOCK=32)
    assert handed[0] == handed[1]


def test_a_listener_of_launches_and_a_changed_global_leave_it_to_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = torch.arange(128.0)
    args = CASES["aligned"](memory)
    for _ in range(2):
        launch(scale_kernel, 1, memory, args, BLOCK=32)
    names = runs_of_triton(monkeypatch)
    launch(scale_kernel, 1, memory, args, BLOCK=32)
    assert names == []
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda _: None)
        launch(scale_kernel, 1, memory, args, BLOCK=32)
    assert names == ["scale_kernel"]
    monkeypatch.setitem(globals(), "FACTOR", tl.constexpr(3))
    with pytest.raises(RuntimeError, match="FACTOR has changed"):
        launch(scale_kernel, 1, memory, args, BLOCK=32)
