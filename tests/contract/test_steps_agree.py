"""Steps over ranks: what one rank refuses, or has another scale for, none takes and all hear."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.helpers.mesh import Experts, Mesh, Training, engine, experts, on_mesh
from tests.helpers.partitions import built, trained
from tests.helpers.sides import SIDES
from twinstep.parity.cases.fixed_inputs import bits

pytestmark = pytest.mark.usefixtures("replay")
BOTH = pytest.mark.parametrize("side", SIDES)
CANNOT = "cannot, and names the reason: all ranks should, or none"
SCALES = "loss scale (is .* on one rank and .* on another|differs from that of another rank).*"


def closure(optimizer: Any, params: list[Any]) -> None:
    optimizer.step(lambda: 0.0)


def sparse(optimizer: Any, params: list[Any]) -> None:
    kept = [param.grad for param in params]
    params[0].grad = torch.zeros_like(params[0]).to_sparse()
    try:
        optimizer.step()
    finally:
        for param, grad in zip(params, kept, strict=True):
            param.grad = grad


def words(optimizer: Any, params: list[Any]) -> None:
    rate = optimizer.param_groups[1]["lr"]
    optimizer.param_groups[1]["lr"] = "0.1"
    try:
        optimizer.step()
    finally:
        optimizer.param_groups[1]["lr"] = rate


REFUSED: dict[Callable[[Any, list[Any]], None], str] = {
    closure: "RuntimeError: a closure was given",
    sparse: "RuntimeError: gradient has layout torch.sparse_coo",
    words: "TypeError: lr='0.1', but should be a number",
}


def assigned(optimizer: Any, scale: float) -> None:
    optimizer.loss_scale = scale


def overridden(optimizer: Any, scale: float) -> None:
    optimizer.override_loss_scale(scale)


def loaded(optimizer: Any, scale: float) -> None:
    scaler = optimizer.loss_scaler
    scaler.load_state_dict({**scaler.state_dict(), "cur_scale": scale})


# By rank; the second has the mean of the others on two of them.
SCALED: dict[Callable[[Any, float], None], tuple[float, ...]] = {
    assigned: (64.0, 64.0, 64.0, 32.0),
    loaded: (32.0, 64.0, 96.0, 64.0),
    overridden: (64.0, 2.0**40, 64.0, 64.0),
}


def unreduced(mesh: Mesh) -> dict[str, Any]:
    return {"mpu": mesh, **engine(mesh, False)}


def with_experts(mesh: Mesh) -> dict[str, Any]:
    return {"mpu": mesh, **experts(mesh)}


def kept(optimizer: Any, params: list[Any]) -> list[object]:
    """Weights, masters, their state and the scaler's: all but gradients, norm and overflow."""
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    state = [optimizer.state.get(master, {}) for master in masters]
    tensors = [*params, *masters, *(torch.as_tensor(v) for s in state for v in s.values())]
    return [*(bits(tensor.detach()) for tensor in tensors), optimizer.loss_scaler.state_dict()]


def heard(optimizer: Any, step: Callable[[], object] | None = None) -> str:
    """The error that a step raises, or what is read after it."""
    try:
        (step or optimizer.step)()
        assert isinstance(optimizer.overflow, bool)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


@BOTH
@pytest.mark.parametrize(
    ("kind", "cls", "groups", "norm_type"),
    [
        ("FP16Optimizer", Training, unreduced, 2.0),
        ("FP16UnfusedOptimizer", Training, unreduced, math.inf),
        ("FP16Optimizer", Training, unreduced, 3.0),
        ("FP16Optimizer", Experts, experts, math.inf),
        ("FP16UnfusedOptimizer", Experts, experts, 1.0),
        ("FP16UnfusedOptimizer", Experts, with_experts, 3.0),
    ],
)
def test_a_step_that_ranks_cannot_take_alike_is_taken_by_none(
    side: str, kind: str, cls: type[Training], groups: Any, norm_type: float
) -> None:
    """All of them hear of it from the messages of the step, and go on as if it had not been."""

    def run(mesh: Mesh, faulty: bool) -> tuple[list[str], list[object]]:
        training = cls(side, mesh, kind=kind, given=groups, norm_type=norm_type)
        optimizer, params = training.optimizer, training.params
        training.fill(0)
        optimizer.step()
        before, said = kept(optimizer, params), []
        for wrong in REFUSED if faulty else ():
            training.fill(1)
            own = partial(wrong, optimizer, params) if mesh.place == (1, 1) else None
            said.append(heard(optimizer, own))
            assert kept(optimizer, params) == before
        for change, scales in SCALED.items() if faulty else ():
            scale = optimizer.loss_scale
            change(optimizer, scales[2 * mesh.place[1] + mesh.place[0]])
            training.fill(1)
            said.append(heard(optimizer))
            change(optimizer, scale)
            assert kept(optimizer, params) == before
        training.fill(2)
        assert heard(optimizer) == "none"
        return said, training.seen()

    sentences, ends = zip(*on_mesh(2, 2, lambda mesh: run(mesh, True)), strict=True)
    *others, own = sentences
    for said, sentence in zip(own, REFUSED.values(), strict=False):
        assert said.startswith(sentence)
    # The fast side adds numbers of ranks up, and here meets the same ranks twice.
    number = "" if side == "fast" and groups is with_experts else r" \(3\)"
    for said in others:
        assert re.fullmatch(f"(ValueError: another rank{number} {CANNOT}){{3}}", "".join(said[:3]))
    for said in sentences:
        assert re.fullmatch(f"(ValueError: {SCALES}){{3}}", "".join(said[3:])), said
    assert list(ends) == [end for _, end in on_mesh(2, 2, lambda mesh: run(mesh, False))]


def model(mesh: Mesh) -> dict[str, Any]:
    return {"mpu": mesh}


def other_experts(mesh: Mesh) -> dict[str, Any]:
    return {"expert_groups": {"e": mesh.row}, "dp_process_group": mesh.column}


@BOTH
@pytest.mark.parametrize(
    ("given", "norm_type"), [(model, 2.0), (model, math.inf), (other_experts, 2.0)]
)
def test_a_bf16_step_that_one_rank_refuses_is_taken_by_no_rank_that_it_talks_to(
    side: str, given: Callable[[Mesh], dict[str, Any]], norm_type: float
) -> None:
    def run(mesh: Mesh, refuses: bool) -> tuple[str, list[object]]:
        params, optimizer = built(side, **given(mesh), norm_type=norm_type)
        trained(params, optimizer, range(1))
        said = "none"
        if refuses:
            before = [bits(param.detach()) for param in params]
            here = mesh.place == (1, 0)
            said = heard(optimizer, (lambda: optimizer.step(lambda: 0.0)) if here else None)
            assert [bits(param.detach()) for param in params] == before
        trained(params, optimizer, range(1, 2))
        return said, [bits(param.detach()) for param in params]

    (others, first), (own, second) = on_mesh(1, 2, lambda mesh: run(mesh, True))
    assert "a closure was given" in own
    assert re.match(r"ValueError: another rank \(1\) cannot", others)
    assert [first, second] == [seen for _, seen in on_mesh(1, 2, lambda mesh: run(mesh, False))]


@pytest.mark.parametrize("norm_type", [2.0, 3.0])
def test_a_gradient_that_no_kernel_takes_is_one_of_all_ranks(norm_type: float) -> None:
    """The launch that reads it is refused, just before the first message."""

    def run(mesh: Mesh) -> str:
        training = Training("fast", mesh, norm_type=norm_type)
        optimizer, params = training.optimizer, training.params
        training.fill(0)
        before = kept(optimizer, params)
        genuine = params[0].data
        if mesh.place == (1, 0):
            params[0].grad = None
            params[0].data = genuine.double()
            params[0].grad = torch.ones_like(params[0])
        said = heard(optimizer)
        params[0].data = genuine
        assert kept(optimizer, params) == before
        training.fill(1)
        assert heard(optimizer) == "none"
        return said

    others, own = on_mesh(1, 2, run)
    assert "float64" in own
    assert others == f"ValueError: another rank (1) {CANNOT}"
