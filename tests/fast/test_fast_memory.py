"""Memory of the fast classes: of a step, of gradients after it, and of a state dict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from tests.helpers.battery import HYPER, Subject, advance, fill, parameters
from tests.helpers.sides import CLASSES, SIDES
from twinstep.fast.optimizers.scalers import DynamicLossScale
from twinstep.replay import modelled_gpu
from twinstep.scenarios.memory import Counted

pytestmark = pytest.mark.usefixtures("replay")

NUMEL = 4096
SMALL = 2 * NUMEL  # bytes of the smallest tensor that is as large as a parameter
PLAIN = [("FusedAdam", ""), ("FusedLamb", "")]
WRAPPED = [
    ("FP16Optimizer", "FusedAdam"),
    ("FP16UnfusedOptimizer", "FusedAdam"),
    ("FP16UnfusedOptimizer", "FusedLamb"),
    ("BF16Optimizer", "FusedAdam"),
    ("ZeroOptimizer", "FusedAdam"),
]
EACH = pytest.mark.parametrize(("name", "inside"), [*PLAIN, *WRAPPED])
WRAPPERS = pytest.mark.parametrize(("name", "inside"), WRAPPED)


def made(side: str, name: str, inside: str) -> tuple[Any, list[Parameter]]:
    """An optimizer over two parameters."""
    if name != "ZeroOptimizer":
        subject = Subject(side, name)
        params = subject.parameters(NUMEL, NUMEL)
        return subject(params, **({"inside": inside, "hyper": HYPER} if inside else HYPER)), params
    params = parameters((NUMEL, NUMEL), torch.bfloat16)
    named = {param: str(place) for place, param in enumerate(params)}
    inner = CLASSES[side][inside](params, **HYPER)
    return CLASSES[side][name](inner, param_names=named, verbose=False), params


def backward(optimizer: Any, params: list[Parameter], seed: int) -> None:
    """New gradients, the way that the class takes them."""
    if hasattr(optimizer, "reduce_gradients"):
        optimizer.backward(sum((seed + 1.5) * param.float().sum() for param in params))
    else:
        fill(params, seed)


@EACH
def test_a_step_makes_nothing_as_large_as_a_parameter(name: str, inside: str) -> None:
    """The first one makes the state."""
    optimizer, params = made("fast", name, inside)
    for seed in range(3):
        backward(optimizer, params, seed)
        with Counted() as counted:
            advance(optimizer)
        assert seed == 0 or counted.most < SMALL


@pytest.mark.parametrize(
    ("side", "name", "inside"),
    [*(("fast", *one) for one in (*PLAIN, *WRAPPED)), ("reference", *WRAPPED[1])],
)
def test_gradients_that_the_caller_drops_are_freed(side: str, name: str, inside: str) -> None:
    """Before the forward pass, in which memory is short."""
    optimizer, params = made(side, name, inside)
    for seed in range(2):
        backward(optimizer, params, seed)
        held = [p.grad.untyped_storage() for p in params if p.grad is not None]
        references = [StorageWeakRef(storage) for storage in held]
        del held
        advance(optimizer)
        for param in params:
            param.grad = None
        assert [reference.expired() for reference in references] == [True] * len(references)


@WRAPPERS
@pytest.mark.parametrize("side", SIDES)
def test_a_state_dict_may_be_on_the_cpu_and_the_device_needs_no_memory_for_it(
    side: str, name: str, inside: str
) -> None:
    optimizer, params = made(side, name, inside)
    backward(optimizer, params, 1)
    advance(optimizer)
    with modelled_gpu():  # on which everything that is there already lies
        plain = tensors_of(optimizer.state_dict())
        with Counted() as counted:
            copies = tensors_of(optimizer.state_dict(cpu_offload=True))
            assert counted.most == counted.bytes
        assert {tensor.is_cuda for tensor in plain} == {True}
        assert {tensor.is_cuda for tensor in copies} == {False}
        assert all(map(torch.equal, copies, [tensor.cpu() for tensor in plain]))
    before = [tensor.clone() for tensor in copies]
    backward(optimizer, params, 2)
    advance(optimizer)
    assert all(map(torch.equal, copies, before))


def tensors_of(saved: object) -> list[Tensor]:
    """In a fixed order."""
    return [leaf for leaf in tree_leaves(saved) if isinstance(leaf, Tensor)]


def test_a_scaler_alone_goes_to_what_it_scales_and_stays() -> None:
    with modelled_gpu():
        scaler = DynamicLossScale(init_scale=8.0, scale_window=1, rule="wrapper")
        scaler.loss_scale = 4.0
        param = Parameter(torch.ones(3, device="cuda"))
        assert scaler.scale_loss(param.sum()).item() == 12.0
        block = scaler.on(torch.device("cuda"))
        assert block.block.is_cuda
        assert scaler.on(torch.device("cuda", 0)) is block
        scaler.scale_loss(torch.ones((), device="cpu"))
        assert scaler.on(torch.device("cuda")) is block
        scaler.update_scale(True)
        assert scaler.loss_scale == 2.0


@pytest.mark.parametrize("looks", [False, True])
def test_a_scaler_that_moves_or_looks_first_is_on_the_gpu_too(looks: bool) -> None:
    with modelled_gpu():
        scaler, param = DynamicLossScale(), Parameter(torch.ones(3, device="cuda"))
        param.grad = torch.full_like(param, float("inf"))
        assert not looks or scaler.has_overflow([param])
        scaler.update_scale(True)
        assert scaler.on(torch.device("cuda")).block.is_cuda
