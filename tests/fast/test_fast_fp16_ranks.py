"""The fast FP16 optimizers over ranks do what the reference does, bit for bit, and alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tests.helpers.mesh import (
    BADS,
    Experts,
    Idle,
    Mesh,
    Training,
    Unreduced,
    compared,
    engine,
    experts,
    norms_of_experts,
    on_mesh,
)
from tests.helpers.sides import CLASSES, SIDES
from twinstep.parity.runner.calls.host_sync import watched

pytestmark = pytest.mark.usefixtures("replay")

KINDS = pytest.mark.parametrize("kind", ["FP16Optimizer", "FP16UnfusedOptimizer"])


@KINDS
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 2), (1, 4), (2, 2)])
def test_a_model_over_ranks_steps_like_the_reference_and_alike(
    rows: int, columns: int, kind: str
) -> None:
    """One rank's infinity or NaN skips the step of all; norm, scale and counters are the same."""
    said = compared(rows, columns, kind=kind)
    assert [step[0] for step in said] == [str(bad is not None) for bad in BADS]
    assert len({step[2] for step in said}) > 2


@KINDS
@pytest.mark.parametrize("norm_type", [1.0, math.inf, 3.0])
def test_every_norm_of_a_model_over_ranks_equals_the_reference(kind: str, norm_type: float) -> None:
    compared(1, 2, kind=kind, norm_type=norm_type)


def with_experts(mesh: Mesh) -> dict[str, Any]:
    """A model over rows, with experts."""
    return {"mpu": mesh, **experts(mesh)}


@pytest.mark.parametrize(("dtype", "norm_type"), [(torch.bfloat16, 2.0), (torch.float32, 3.0)])
def test_models_of_other_dtypes_step_over_ranks_like_the_reference(
    dtype: torch.dtype, norm_type: float
) -> None:
    compared(1, 2, dtype=dtype, given=with_experts, cls=Experts, norm_type=norm_type)


@KINDS
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf, 3.0])
def test_experts_on_different_ranks_step_like_the_reference(kind: str, norm_type: float) -> None:
    """Their norms enter one sum before the root; whose copies are equal, average to themselves."""
    world = (2, 2) if norm_type == 2.0 else (1, 2)
    said = compared(*world, cls=Experts, kind=kind, given=experts, norm_type=norm_type)
    assert [step[0] for step in said] == [str(bad is not None) for bad in BADS]


@pytest.mark.parametrize("inside", ["FusedLamb", "SGD"])
def test_other_optimizers_inside_step_over_ranks_like_the_reference(inside: str) -> None:
    options: dict[str, Any] = {"kind": "FP16UnfusedOptimizer", "inside": inside}
    compared(1, 2, cls=Training, **options)
    compared(1, 2, cls=Experts, given=experts, **options)


@KINDS
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_gradient_that_does_not_count_still_skips_the_step(kind: str, norm_type: float) -> None:
    """A copy on the second rank of the first parameter, which is not split."""
    said = compared(1, 2, kind=kind, norm_type=norm_type, slot=0)
    assert [step[0] for step in said] == [str(bad is not None) for bad in BADS]
    assert not math.isfinite(float.fromhex(said[1][1]))


@pytest.mark.parametrize("unit", [True, False], ids=["data-parallel group", "all ranks"])
def test_ranks_whose_gradients_nobody_reduced_agree_on_an_overflow(unit: bool) -> None:
    """Without a model-parallel unit these are all ranks of the default group."""

    def given(mesh: Mesh) -> dict[str, Any]:
        return {**({"mpu": mesh} if unit else {}), **engine(mesh, False)}

    said = compared(2, 1, cls=Unreduced, given=given)
    assert [step[0] for step in said] == [str(bad is not None) for bad in BADS]


class UnreducedExperts(Unreduced, Experts):
    """Nobody has reduced anything, and there are experts."""


def copies(mesh: Mesh) -> dict[str, Any]:
    """Copies of experts hear of each other."""
    return {"expert_data_groups": {"e": mesh.column}}


def without_copies(mesh: Mesh) -> dict[str, Any]:
    """Ranks of a column have nothing in common but the engine's group, that of all ranks."""
    return {"expert_groups": {"e": mesh.row}, **engine(mesh, False)}


@pytest.mark.parametrize("given", [copies, without_copies])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_ranks_with_experts_agree_on_an_overflow_of_what_is_shared(
    norm_type: float, given: Callable[[Mesh], dict[str, Any]]
) -> None:
    options: dict[str, Any] = {"given": given, "norm_type": norm_type}
    said = compared(2, 1, cls=UnreducedExperts, slot=0, **options)
    assert [step[0] for step in said] == [str(bad is not None) for bad in BADS]


def test_a_rank_without_any_gradient_agrees_like_the_others() -> None:
    said = compared(1, 2, cls=Idle)
    assert [step[0] for step in said] == [str(bad is not None) for bad in BADS]


def test_upstreams_norm_leaves_out_the_experts_of_all_ranks() -> None:
    """Edge ME-3: they skip a step, and clip nothing."""
    options: dict[str, Any] = {"cls": Experts, "kind": "FP16UnfusedOptimizer", "given": experts}
    ours = compared(1, 2, **options, compat={"clip_without_experts": True})
    theirs = compared(1, 2, **options)
    assert ours[0][1] != theirs[0][1]
    assert [step[0] for step in ours] == [step[0] for step in theirs]


@pytest.mark.parametrize(
    ("given", "grads"),
    [
        (experts, (1.0, 2.0, 6.0)),
        (experts, (0.3, 1.7)),
        (copies, (1e-3, 5.0, 7.0, 0.1)),
        (copies, (1.0, 2.0, 6.0, 0.3, 1.7)),
    ],
)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_the_norm_of_experts_that_differ_is_averaged_over_their_copies(
    norm_type: float, given: Callable[[Mesh], dict[str, Any]], grads: tuple[float, ...]
) -> None:
    """Sums of powers are: 33 elements, of another value on each rank. All ranks clip alike."""
    found = norms_of_experts("fast", list(grads), given, norm_type)
    assert found == norms_of_experts("reference", list(grads), given, norm_type)
    wanted = max(grads)
    if norm_type < math.inf:
        wanted = (33 * sum(g**norm_type for g in grads) / len(grads)) ** (1.0 / norm_type)
    assert found == [pytest.approx(wanted, rel=1e-3)] * len(grads)
    alone = norms_of_experts("fast", [1.7] * len(grads), lambda mesh: {}, norm_type)
    assert norms_of_experts("fast", [1.7] * len(grads), given, norm_type) == alone


@KINDS
def test_a_step_over_ranks_waits_for_nothing_and_sends_one_sum(kind: str) -> None:
    """A collective for each group, of 32 integers: experts, copies of them, the model."""

    def run(cls: type[Training], given: Callable[[Mesh], dict[str, Any]]) -> list[object]:
        def one(mesh: Mesh) -> tuple[list[str], object]:
            training = cls("fast", mesh, kind=kind, given=given)
            training.fill(0)
            training.optimizer.step()
            mesh.calls.clear()
            training.fill(1)
            control = training.optimizer._step.control
            with ExitStack() as stack:
                device = [p.grad for p in training.params] + [control["norm"], control["scale"]]
                reads = [
                    stack.enter_context(watched(tensor)) for tensor in device if tensor.numel()
                ]
                training.optimizer.step()
            sent = [(call.collective, call.elements, call.dtype) for call in mesh.calls]
            return [read for each in reads for read in each], sent

        return list(on_mesh(1, 2, one))

    message = ("all_reduce", 32, torch.int64)
    assert run(Training, lambda mesh: {"mpu": mesh}) == [([], [message])] * 2
    both = lambda mesh: {"mpu": mesh, **experts(mesh)}  # noqa: E731
    assert run(Experts, both) == [([], [message] * 3)] * 2


@pytest.mark.parametrize("side", SIDES)
def test_the_error_at_the_floor_comes_on_all_ranks_at_once(side: str) -> None:
    """Edge LS-9: one rank overflows, every rank raises and has changed nothing."""

    def run(mesh: Mesh) -> tuple[str, bool]:
        floor = {"init_scale": 1.0, "min_scale": 1.0, "delayed_shift": 1}
        scaler = CLASSES[side]["DynamicLossScale"](**floor, raise_error_at_min_scale=True)
        training = Training(side, mesh, loss_scale_config=scaler)
        before = [param.detach().clone() for param in training.params]
        training.fill(0, math.inf)
        try:
            training.optimizer.step()
            training.optimizer.get_global_norm()
        except RuntimeError as error:
            same = all(map(torch.equal, training.params, before))
            return type(error).__name__, same
        return "nothing", False

    assert on_mesh(1, 2, run) == [("MinimumLossScale", True)] * 2
