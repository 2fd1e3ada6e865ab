"""Launches that are made again: where they are, what ends it, and that nothing is kept alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch.nn import Parameter

from tests.helpers.battery import HYPER, Subject, advance, fill, observed, runs_of_triton
from twinstep.fast.kernels.reduce import reduce_list_kernel
from twinstep.fast.optimizers.parallelism import SHARED, Parallelism
from twinstep.fast.optimizers.plan import GradientPlan
from twinstep.fast.runtime import recorder, repeated

PLAIN = ("FusedAdam", "FusedLamb")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in PLAIN},
    "FP16Optimizer": ("FP16Optimizer", {"clip_grad": 0.5}),
    "FP16Optimizer, FusedLamb": ("FP16Optimizer", {"clip_grad": 0.5, "inside": "FusedLamb"}),
    "FP16UnfusedOptimizer": ("FP16UnfusedOptimizer", {"clip_grad": 0.5}),
    "FP16UnfusedOptimizer, FusedLamb": (
        "FP16UnfusedOptimizer",
        {"clip_grad": 0.5, "inside": "FusedLamb"},
    ),
    "BF16Optimizer": ("BF16Optimizer", {"clip_grad": 0.5}),
}
SHAPES = (70, (3, 10), 5, (2, 7))
Change = Callable[[Any, list[Parameter]], object]


class Counted:
    """Steps whose launches were made anew, as far as they could have been repeated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.anew = 0
        original = recorder.Recorder.__init__

        def counted(made: recorder.Recorder, lists: recorder.TensorLists) -> None:
            self.anew += 1
            original(made, lists)

        monkeypatch.setattr(recorder.Recorder, "__init__", counted)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Counts for one test."""
    return Counted(monkeypatch)


def built(side: str, kind: str, *shapes: int | tuple[int, ...]) -> tuple[Any, list[Parameter]]:
    """An optimizer over two groups, or one of one parameter."""
    name, options = KINDS[kind]
    subject = Subject(side, name)
    params = subject.parameters(*shapes)
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.05}]
    return subject(groups if len(params) > 2 else params, hyper=HYPER, **options), params


def held(optimizer: Any) -> Any:
    """The optimizer whose options decide."""
    return getattr(optimizer, "_inner", None) or optimizer


def _other_form(optimizer: Any, params: list[Parameter]) -> None:
    name = "adam_w_mode" if hasattr(held(optimizer), "adam_w_mode") else "eps_inside_sqrt"
    setattr(held(optimizer), name, not getattr(held(optimizer), name))


def _no_correction(optimizer: Any, params: list[Parameter]) -> None:
    optimizer.param_groups[-1]["bias_correction"] = False


def _rate_on_the_device(optimizer: Any, params: list[Parameter]) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.3, dtype=torch.float64)


def _hooked(optimizer: Any, params: list[Parameter]) -> None:
    held(optimizer).register_step_post_hook(lambda *_: None)


def _external_scale(optimizer: Any, params: list[Parameter]) -> None:
    if hasattr(optimizer, "override_loss_scale"):
        optimizer.override_loss_scale(8.0)


def _no_clipping(optimizer: Any, params: list[Parameter]) -> None:
    if hasattr(optimizer, "clip_grad"):
        optimizer.clip_grad = 0.0


CHANGES: dict[str, Change | None] = {
    "none": None,
    "form": _other_form,
    "bias correction": _no_correction,
    "rate on the device": _rate_on_the_device,
    "hook": _hooked,
    "external scale": _external_scale,
    "clipping": _no_clipping,
}


def trained(side: str, kind: str, change: Change | None, *shapes: Any) -> list[object]:
    """State after each of seven steps; the change comes before the fifth."""
    optimizer, params = built(side, kind, *(shapes or SHAPES))
    seen: list[object] = []
    for seed in range(7):
        fill(params, seed)
        if seed == 4 and change is not None:
            change(optimizer, params)
        advance(optimizer)
        # State appears when something is read after the first step: then lists are laid out.
        if seed != 2:
            seen.append(observed(optimizer, params))
    return seen


@pytest.mark.parametrize("label", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_are_repeated_have_the_bits_of_the_reference(kind: str, label: str) -> None:
    change = CHANGES[label]
    assert trained("fast", kind, change) == trained("reference", kind, change)


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_alone_is_stepped_with_the_gradient_of_now(kind: str) -> None:
    assert trained("fast", kind, None, 40) == trained("reference", kind, None, 40)


@pytest.mark.parametrize("engine", ["native", "compiled"])
@pytest.mark.parametrize("kind", KINDS)
def test_launches_are_made_anew_only_where_something_has_changed(
    kind: str, engine: str, counted: Counted, request: pytest.FixtureRequest
) -> None:
    if engine == "compiled":
        request.getfixturevalue("replay")
    optimizer, params = built("fast", kind, *SHAPES)
    anew = []
    for seed in range(7):
        fill(params, seed)
        if seed == 5:
            _other_form(optimizer, params)
        advance(optimizer)
        observed(optimizer, params)
        anew.append(counted.anew)
    assert anew[2:5] == [anew[2]] * 3
    assert anew[5:] == [anew[2] + 1, anew[6]]


@pytest.mark.parametrize("kind", ["FusedAdam", "FP16Optimizer", "FP16UnfusedOptimizer"])
def test_a_gradient_alone_that_is_not_on_16_bytes_ends_it(
    kind: str, replay: object, counted: Counted
) -> None:
    def beside(_: Any, params: list[Parameter]) -> None:
        grad = params[0].grad
        assert grad is not None
        room = torch.empty(grad.numel() + 1, dtype=grad.dtype)
        params[0].grad = room[1:].view(grad.shape).copy_(grad)

    plain = trained("fast", kind, None, 40)
    before = counted.anew
    assert trained("fast", kind, beside, 40) == plain
    # Step 5 has a table, step 6 none again.
    assert counted.anew - before >= 3


@pytest.mark.parametrize("kind", PLAIN)
def test_a_parameter_of_another_dtype_ends_it(kind: str) -> None:
    def half(optimizer: Any, params: list[Parameter]) -> None:
        params[0].data = params[0].data.to(torch.bfloat16)
        assert params[0].grad is not None
        params[0].grad = None
        params[0].grad = torch.full_like(params[0], 0.25)

    assert trained("fast", kind, half) == trained("reference", kind, half)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_is_kept_alive(kind: str, strided: bool) -> None:
    for shapes in (SHAPES, (40,)):
        optimizer, params = built("fast", kind, *shapes)
        for seed in range(4):
            fill(params, seed)
            for param in params if strided else ():
                param.grad = torch.full((*param.shape, 2), 0.25, dtype=param.dtype)[..., 0]
            grads = [weakref.ref(param.grad) for param in params if param.grad is not None]
            advance(optimizer)
            for param in params:
                param.grad = None
            assert [grad() for grad in grads] == [None] * len(params)


@pytest.mark.parametrize("listener", ["launch", "kernel"])
def test_somebody_who_listens_hears_of_every_launch(
    listener: str, replay: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, params = built("fast", "FP16Optimizer", *SHAPES)

    def step(seed: int) -> None:
        fill(params, seed)
        advance(optimizer)

    for seed in range(4):
        step(seed)
    names = runs_of_triton(monkeypatch)
    step(4)
    assert names == []
    heard: list[object] = []
    if listener == "launch":
        monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", heard.append)
    else:
        hooks = [lambda *_, **__: heard.append(None)]
        monkeypatch.setattr(reduce_list_kernel, "pre_run_hooks", hooks)
    step(5)
    assert "reduce_list_kernel" in names
    assert heard


def test_a_graph_that_is_captured_gets_launches_of_its_own(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, params = built("fast", "FP16Optimizer", *SHAPES)
    for seed in range(4):
        fill(params, seed)
        if seed == 3:
            monkeypatch.setattr(repeated, "is_capturing", lambda _: True)
        advance(optimizer)
    assert optimizer._step._repeated._kept is None


def test_an_argument_that_lies_elsewhere_ends_it(counted: Counted) -> None:
    optimizer, params = built("fast", "FP16Optimizer", *SHAPES)

    def step(seed: int) -> int:
        fill(params, seed)
        advance(optimizer)
        observed(optimizer, params)
        return counted.anew

    before = [step(seed) for seed in range(4)][-1]
    memory: Tensor = optimizer._step._limbs
    memory.data = memory.data.clone()
    assert step(4) == before + 1


def test_gradients_are_kept_apart_from_those_of_steps_that_ask_other_ranks() -> None:
    param = Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    plan = GradientPlan([[param]], [SHARED], torch.zeros_like)
    engine = SimpleNamespace(enable_backward_allreduce=True)
    ranks = Parallelism(engine=engine)
    kept = plan.gradients(ranks)
    engine.enable_backward_allreduce = False
    assert plan.gradients(ranks) is not kept
    engine.enable_backward_allreduce = True
    assert plan.gradients(ranks) is kept
