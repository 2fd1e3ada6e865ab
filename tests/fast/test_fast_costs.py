"""Costs of a step of the fast classes: launches, bytes, operators, reads, compilations."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import twinstep.replay
from tests.helpers.battery import HYPER, Subject, fill, masters_of, parameters
from tests.helpers.costs import Operators, compilations
from tests.helpers.sides import COUNTING
from twinstep.parity.runner.calls.host_sync import watched

pytestmark = pytest.mark.usefixtures("replay")

FLAT, UNFUSED = Subject("fast", "FP16Optimizer"), Subject("fast", "FP16UnfusedOptimizer")
SCALED = {"dynamic_loss_scale": True, "clip_grad": 0.5}
BOTH = pytest.mark.parametrize("subject", [FLAT, UNFUSED], ids=str)
INSIDE = pytest.mark.parametrize("inside", COUNTING)


def one_group(subject: Subject, inside: str) -> tuple[Any, list[Parameter]]:
    """Parameters of one group, without gaps that a warp could read across."""
    params = parameters((4096, 4096), torch.float16)
    return subject(params, inside=inside, hyper=HYPER, **SCALED), params


def on_the_device(optimizer: Any, params: list[Parameter]) -> list[Tensor]:
    """Tensors that would lie in a GPU's memory: the control block, state, weights, gradients."""
    held = [tensor for state in optimizer.state.values() for tensor in state.values()]
    block = optimizer.loss_scaler.on(torch.device("cpu")).block
    grads = [param.grad for param in params if param.grad is not None]
    return [block, *masters_of(optimizer), *(param.detach() for param in params), *held, *grads]


@BOTH
@INSIDE
def test_launches_and_bytes_of_a_step_are_those_of_the_design(
    subject: Subject, inside: str
) -> None:
    """In each of two steps; none waits for the device."""
    count, size = {"FusedAdam": (3, 30), "FusedLamb": (5, 42)}[inside]
    optimizer, params = one_group(subject, inside)
    for seed in range(2):
        fill(params, seed)
        with ExitStack() as stack:
            reads = [stack.enter_context(watched(t)) for t in on_the_device(optimizer, params)]
            log = stack.enter_context(twinstep.replay.launches())
            optimizer.step()
        assert not any(reads)
        assert len(log) == count
        # Past the pointer table: parameters and what is as large; a counter of each is not.
        moved = sum(
            traffic.read + traffic.written
            for launch in log
            for name, traffic in launch.buffers.items()
            if name.startswith("table[") and "finalise" not in launch.kernel
        )
        assert moved == size * sum(param.numel() for param in params)


@BOTH
@INSIDE
def test_backward_and_step_neither_compute_in_torch_nor_wait(subject: Subject, inside: str) -> None:
    optimizer, params = one_group(subject, inside)
    for seed in range(3):
        fill(params, seed)
        loss = sum((param.float().sum() for param in params), torch.zeros(()))
        with ExitStack() as stack:
            reads = [stack.enter_context(watched(t)) for t in on_the_device(optimizer, params)]
            optimizer.backward(loss)
            with Operators(1000) as operators:
                optimizer.step()
        assert not any(reads)
        # State is made with the first step, as many zeros as there are parameters.
        assert seed == 0 or operators.large == []


def test_the_watch_notices_a_read_and_an_operator() -> None:
    optimizer, params = one_group(FLAT, "FusedAdam")
    fill(params, 0)
    optimizer.step()
    block = optimizer.loss_scaler.on(torch.device("cpu")).block
    with watched(block) as reads, Operators(1000) as operators:
        assert not optimizer.overflow
        params[0].detach().mul_(2.0)
        torch.ones(1).item()
    assert reads
    assert operators.large == ["mul_"]
    assert operators.waits


@INSIDE
def test_a_second_step_compiles_nothing_and_uploads_no_table_again(inside: str) -> None:
    params = parameters((70, 0, 300, 5), torch.float16)
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.3}]
    optimizer = FLAT(groups, inside=inside, hyper=HYPER, **SCALED)
    fill(params, 0)
    grads = [param.grad for param in params]
    optimizer.step()
    built = optimizer._step.cache.built
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    with compilations() as names:
        optimizer.step()
    assert names == []
    assert optimizer._step.cache.built == built


def test_a_step_of_apexs_lamb_is_one_norm_and_four_launches_for_each_group() -> None:
    """Nothing waits, and a second step uploads nothing."""
    params = parameters((700, 0, 33), torch.float32)
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    optimizer = Subject("fast", "FusedLAMB")(groups, **HYPER)
    fill(params, 1)
    optimizer.step()
    built = optimizer._cache.built
    with ExitStack() as stack:
        held = [*params, *(t for state in optimizer.state.values() for t in state.values())]
        reads = [stack.enter_context(watched(t.detach())) for t in held]
        log = stack.enter_context(twinstep.replay.launches())
        optimizer.step()
    assert not any(reads)
    assert sum(launch.kernel.startswith("apex_lamb_") for launch in log) == 8
    assert len(log) == 10
    assert optimizer._cache.built == built


def test_a_group_of_lamb_is_four_launches_and_a_second_step_uploads_nothing() -> None:
    params = parameters((700, 0, 33), torch.float32)
    optimizer = Subject("fast", "FusedLamb")(params, **HYPER)
    fill(params, 1)
    optimizer.step()
    built = optimizer._cache.built
    with twinstep.replay.launches() as log:
        optimizer.step()
    assert len(log) == 4
    assert optimizer._cache.built == built
