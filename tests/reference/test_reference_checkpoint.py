"""Checkpoints of the FP16 optimizers: resumed bit for bit, read safely, refused in one sentence."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from twinstep.contract.checkpoint import read_checkpoint
from twinstep.parity.cases.fixed_inputs import bits, moderate
from twinstep.reference.optimizers.fp16 import FP16Optimizer
from twinstep.reference.optimizers.fp16_unfused import FP16UnfusedOptimizer
from twinstep.reference.optimizers.fused_adam import FusedAdam
from twinstep.reference.optimizers.fused_lamb import FusedLamb

HALF, BRAIN = torch.float16, torch.bfloat16
Wrapper = FP16Optimizer | FP16UnfusedOptimizer
Inside = Callable[[list[dict[str, object]]], torch.optim.Optimizer]
INSIDE: dict[str, Inside] = {
    "FusedAdam": lambda groups: FusedAdam(groups, lr=0.02, weight_decay=0.1),
    "FusedLamb": lambda groups: FusedLamb(groups, lr=0.02, weight_decay=0.1),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.02),
}
WRAPPERS: dict[str, Callable[..., Wrapper]] = {
    "flat": FP16Optimizer,
    "unfused": FP16UnfusedOptimizer,
}
ARGS = {"init_scale": 16.0, "scale_window": 2, "min_scale": 0.25}
KINDS = pytest.mark.parametrize("kind", list(WRAPPERS))


def built(
    kind: str = "flat", inside: str = "FusedAdam", dtype: torch.dtype = HALF, **options: object
) -> tuple[list[nn.Parameter], Wrapper]:
    """Two groups; equal every time."""
    params = [nn.Parameter(moderate(size, size, dtype)) for size in (5, 0, 3)]
    groups: list[dict[str, object]] = [{"params": params[:2]}, {"params": params[2:], "lr": 0.01}]
    chosen: dict[str, object] = {"dynamic_loss_scale": True, "dynamic_loss_args": ARGS}
    chosen |= {"clip_grad": 0.5, "verbose": False, "low_precision_dtype": dtype, **options}
    return params, WRAPPERS[kind](INSIDE[inside](groups), **chosen)


def trained(params: list[nn.Parameter], optimizer: Wrapper, steps: range) -> None:
    """Steps with numbered gradients; the fourth overflows."""
    for number in steps:
        for place, param in enumerate(params):
            grad = 16 * moderate(param.numel(), 10 * number + place, param.dtype)
            param.grad = grad * math.inf if number == 3 else grad
        optimizer.step()
        optimizer.zero_grad()


def everything(value: object) -> object:
    """Tensors as dtype, shape and bits; everything else as it is."""
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.shape), bits(value.detach()))
    if isinstance(value, dict):
        return {key: everything(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [everything(inside) for inside in value]
    return value


@KINDS
@pytest.mark.parametrize("inside", list(INSIDE))
@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("cut", [0, 2, 4])
def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(
    kind: str, inside: str, dtype: torch.dtype, cut: int, tmp_path: Path
) -> None:
    whole, uninterrupted = built(kind, inside, dtype)
    trained(whole, uninterrupted, range(7))
    first, saving = built(kind, inside, dtype)
    trained(first, saving, range(cut))
    file = tmp_path / "state.pt"
    torch.save(saving.state_dict(), file)
    second, resumed = built(kind, inside, dtype)
    resumed.load_state_dict(read_checkpoint(file))
    assert [bits(p.detach()) for p in second] == [bits(p.detach()) for p in first]
    trained(second, resumed, range(cut, 7))
    assert everything(resumed.state_dict()) == everything(uninterrupted.state_dict())
    assert [bits(p.detach()) for p in second] == [bits(p.detach()) for p in whole]
    assert resumed.loss_scale == uninterrupted.loss_scale


@KINDS
def test_a_state_dict_is_not_changed_by_later_steps(kind: str) -> None:
    """Edge FP-8; and loading copies too."""
    params, optimizer = built(kind)
    trained(params, optimizer, range(2))
    saved = optimizer.state_dict()
    masters = {key: value for key, value in saved.items() if key.startswith("fp32_groups")}
    before = everything(masters)
    optimizer.load_state_dict(saved)
    trained(params, optimizer, range(2))
    assert everything(masters) == before


@KINDS
def test_states_of_the_optimizer_inside_can_be_left_out(kind: str) -> None:
    params, optimizer = built(kind)
    trained(params, optimizer, range(3))
    others, other = built(kind)
    other.load_state_dict(optimizer.state_dict(), load_optimizer_states=False)
    assert not other.state
    assert [bits(p.detach()) for p in others] == [bits(p.detach()) for p in params]
    assert other.loss_scale == optimizer.loss_scale


def without(key: str) -> Callable[[dict[str, object]], object]:
    return lambda state: {name: value for name, value in state.items() if name != key}


def inner_with(shape: tuple[int, ...]) -> Callable[[dict[str, object]], object]:
    def changed(state: dict[str, object]) -> object:
        inner = copy.deepcopy(state["optimizer_state_dict"])
        assert isinstance(inner, dict)
        inner["state"][0]["exp_avg"] = torch.zeros(shape)
        return {**state, "optimizer_state_dict": inner}

    return changed


WRONG: dict[str, tuple[Callable[[dict[str, object]], object], str]] = {
    "no dict": (lambda _: [1], "state is a list, but should be a dict"),
    "foreign": (lambda _: {"weights": 1}, "state has no optimizer_state_dict, fp32"),
    "no scale": (without("cur_scale"), "state has no cur_scale, but should"),
    "static": (
        lambda s: {**s, "dynamic_loss_scale": False},
        "dynamic_loss_scale=False, but should be True: the rule comes from",
    ),
    "clip": (lambda s: {**s, "clip_grad": "much"}, "clip_grad='much', but should be a number"),
    "inner": (lambda s: {**s, "optimizer_state_dict": 3}, "should be the state dict of an optim"),
    "groups": (
        lambda s: {**s, "optimizer_state_dict": {"state": {}, "param_groups": [{}]}},
        "should be the state dict of an optim",
    ),
    "sizes": (
        lambda s: {**s, "optimizer_state_dict": {"state": {}, "param_groups": [{"params": [0]}]}},
        "state has groups of",
    ),
    "moments": (inner_with((2,)), "exp_avg of parameter 0 has shape"),
}


@KINDS
@pytest.mark.parametrize("wrong", list(WRONG))
def test_what_does_not_fit_is_said_in_one_sentence_and_changes_nothing(
    kind: str, wrong: str
) -> None:
    make, message = WRONG[wrong]
    params, optimizer = built(kind)
    trained(params, optimizer, range(3))
    source, other = built(kind)
    trained(source, other, range(5))
    before = everything(optimizer.state_dict())
    state = make(other.state_dict())
    with pytest.raises(ValueError, match=message) as caught:
        optimizer.load_state_dict(state)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert everything(optimizer.state_dict()) == before


def test_the_lamb_path_resumes_bit_for_bit() -> None:
    make: Callable[..., FP16UnfusedOptimizer] = FP16UnfusedOptimizer
    runs = []
    for cut in (0, 2):
        params = [nn.Parameter(moderate(size, size, HALF)) for size in (5, 3)]
        optimizer = make(FusedLamb(params, lr=0.02), fused_lamb_legacy=True)
        trained(params, optimizer, range(cut or 5))
        if cut:
            state = copy.deepcopy(optimizer.state_dict())
            params = [nn.Parameter(torch.zeros_like(p)) for p in params]
            optimizer = make(FusedLamb(params, lr=0.02), fused_lamb_legacy=True)
            optimizer.load_state_dict(state)
            trained(params, optimizer, range(cut, 5))
        runs.append(everything(optimizer.state_dict()))
    assert runs[0] == runs[1]


def test_a_checkpoint_without_a_clip_norm_keeps_that_of_the_constructor() -> None:
    """Edge UF-6: upstream's unfused optimizer saves none."""
    _, optimizer = built("unfused", clip_grad=0.75)
    state = built("unfused", clip_grad=0.5)[1].state_dict()
    assert state.pop("clip_grad") == 0.5
    optimizer.load_state_dict(state)
    assert optimizer.clip_grad == 0.75


@KINDS
def test_state_of_torchs_adam_goes_on_in_fused_adam(kind: str) -> None:
    """Options that the other optimizer does not know stay those of the constructor."""
    params, optimizer = built(kind, "Adam")
    trained(params, optimizer, range(2))
    others, other = built(kind, "FusedAdam")
    other.load_state_dict(optimizer.state_dict())
    trained(others, other, range(2, 3))
    assert other.param_groups[0]["bias_correction"] is True
    assert other.state_dict()["cur_iter"] == 3


@KINDS
@pytest.mark.parametrize("change", ["fewer", "other"])
def test_masters_that_do_not_fit_are_refused(kind: str, change: str) -> None:
    _, optimizer = built(kind)
    state = optimizer.state_dict()
    key = next(name for name in state if name.startswith("fp32_groups"))
    masters = state[key]
    assert isinstance(masters, list)
    first = masters[0][0] if isinstance(masters[0], list) else masters[0]
    other = torch.zeros(first.numel() + 1)
    replaced = [other, *masters[0][1:]] if isinstance(masters[0], list) else other
    state[key] = masters[:1] if change == "fewer" else [replaced, *masters[1:]]
    with pytest.raises(ValueError, match="but should have"):
        optimizer.load_state_dict(state)


def test_a_file_is_read_without_running_code(tmp_path: Path) -> None:
    """Edge CK-2: what would have to be run is refused."""
    torch.save({"scaler": Path("x")}, tmp_path / "foreign.pt")
    with pytest.raises(ValueError, match="foreign.pt should be a whole checkpoint of tensors"):
        read_checkpoint(tmp_path / "foreign.pt")
    _, optimizer = built()
    torch.save(optimizer.state_dict(), tmp_path / "ours.pt")
    assert everything(read_checkpoint(tmp_path / "ours.pt")) == everything(optimizer.state_dict())


@pytest.mark.parametrize("left", [0, 10, 400, -30])
def test_a_truncated_file_is_refused(tmp_path: Path, left: int) -> None:
    _, optimizer = built()
    file = tmp_path / "state.pt"
    torch.save(optimizer.state_dict(), file)
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(ValueError, match="state.pt should be a whole checkpoint") as caught:
        read_checkpoint(file)
    assert "\n" not in str(caught.value)


def test_a_file_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "tensor.pt")
    with pytest.raises(ValueError, match=r"tensor.pt holds a Tensor, but should hold a dict"):
        read_checkpoint(tmp_path / "tensor.pt")
