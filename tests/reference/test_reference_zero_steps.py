"""ZeroOptimizer of the reference: steps, skips and loss scales, edge by edge."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.ranks import on_ranks
from tests.helpers.zero_built import (
    BRAIN,
    HALF,
    SINGLE,
    Group,
    built,
    fill,
    masters,
    moves,
    place,
    seen,
    trained,
)
from twinstep.contract.compat import Compat
from twinstep.contract.errors import MinimumLossScale
from twinstep.parity.cases.fixed_inputs import bits, moderate
from twinstep.reference.optimizers.bf16 import BF16Optimizer
from twinstep.reference.optimizers.fused_adam import FusedAdam

STAGES = (False, True)
MOVING = {"init_scale": 4.0, "scale_window": 2, "min_scale": 1.0, "delayed_shift": 1}


def test_a_growing_scale_divides_by_the_scale_of_the_gradients() -> None:
    """Edge Z-8; upstream divides by the next one, and reports the right norm all the same."""

    def run(compat: Compat) -> list[tuple[float, float]]:
        options: dict[str, Any] = {
            "dynamic_loss_scale": True,
            "dynamic_loss_args": MOVING,
            "compat": compat,
        }
        params, optimizer = built(None, (1,), **options)
        found = []
        for _ in range(6):
            moved = moves(params, optimizer, [optimizer.loss_scale])[0]
            found.append((moved, optimizer.get_global_norm()))
        return found

    assert run(Compat()) == [(1.0, 1.0)] * 6
    halved = [1.0, 1.0, 0.5, 1.0, 0.5, 1.0]
    late = Compat(unscale_with_updated_scale=True)
    assert run(late) == [(moved, 1.0) for moved in halved]


def test_a_closure_is_refused_on_all_ranks() -> None:
    """Edge Z-20; the rank that was given none raises, too."""

    def run(group: Group) -> str:
        params, optimizer = built(group)
        fill(params, 1.0)
        try:
            optimizer.step((lambda: 0.0) if place(group) else None)
        except (RuntimeError, ValueError) as error:
            return str(error)
        return ""

    told = on_ranks(2, run)
    assert "another rank" in told[0]
    assert "a closure was given, but should not be" in told[1]


def test_edits_of_model_weights_are_lost_at_the_next_step() -> None:
    """Edge Z-24: masters count, until `refresh_fp32_params` takes the edit over."""
    params, optimizer = built(None, (2,))
    before = params[0].detach().clone()
    with torch.no_grad():
        params[0].fill_(9.0)
    params[0].grad = torch.zeros_like(params[0])
    optimizer.step()
    assert bits(params[0].detach()) == bits(before)
    with torch.no_grad():
        params[0].fill_(9.0)
    optimizer.refresh_fp32_params()
    optimizer.update_lp_params()
    assert masters(params, optimizer)[0].tolist() == params[0].tolist() == [9.0, 9.0]


@pytest.mark.parametrize("stage2", STAGES)
@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
def test_an_overflow_anywhere_skips_the_step_everywhere(stage2: bool, dtype: torch.dtype) -> None:
    """Edges Z-26 and OV-7: NaN of one rank, in an element that another rank owns."""

    def run(group: Group) -> list[Any]:
        params, optimizer = built(group, dtype=dtype, partition_grads=stage2)
        before = seen(params, optimizer)[:6]
        fill(params, 1.0)
        if place(group) == 0:
            assert params[2].grad is not None
            params[2].grad[-1] = math.nan
        optimizer.step()
        same = seen(params, optimizer)[:6] == before
        return [same, optimizer.overflow, math.isnan(optimizer.get_global_norm()), params[0].grad]

    assert on_ranks(3, run) == [[True, True, True, None]] * 3


def test_a_step_without_the_check_says_that_there_was_no_overflow() -> None:
    """Edge OV-8: the flag is that of the last step, and False without a check."""
    params, optimizer = built(None, (2,), dtype=BRAIN)
    fill(params, math.inf)
    optimizer.step()
    assert optimizer.overflow
    params, optimizer = built(None, (2,), dtype=BRAIN, check_grad_overflow=False)
    fill(params, math.inf)
    optimizer.step()
    assert not optimizer.overflow
    assert not torch.isfinite(params[0]).any()
    with pytest.raises(ValueError, match="check_grad_overflow=False, but should be True for an f"):
        built(None, check_grad_overflow=False)


def test_the_loss_is_scaled_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edge LS-15: four times 32768 is no fp16 number."""
    began: list[tuple[torch.dtype, float]] = []
    backward = torch.Tensor.backward

    def watched(loss: torch.Tensor, **options: Any) -> None:
        began.append((loss.dtype, loss.item()))
        backward(loss, **options)

    monkeypatch.setattr(torch.Tensor, "backward", watched)
    params, optimizer = built(None, (1,), static_loss_scale=2.0**15)
    optimizer.backward(params[0].sum() * 0.0 + 4.0)
    assert began == [(torch.float32, 2.0**17)]


def test_a_step_without_any_gradient_is_refused_on_all_ranks() -> None:
    """Edge OV-6; one rank with a gradient is enough for all."""

    def run(group: Group) -> list[Any]:
        params, optimizer = built(group)
        found: list[Any] = []
        for with_gradient in (False, True, False):
            if with_gradient and place(group) == 1:
                fill(params, 1.0)
            try:
                optimizer.step()
                found.append(optimizer.get_global_norm())
            except RuntimeError as error:
                found.append(str(error))
        return found

    refused = (
        "there is no gradient on any rank since the last step, but should be: call backward before "
        "each step [ZeroOptimizer.step]"
    )
    assert on_ranks(2, run) == [[refused, pytest.approx(math.sqrt(3)), refused]] * 2


def test_an_error_at_the_floor_is_that_of_all_ranks() -> None:
    """Nothing has changed, and trying again raises again."""
    floor = {**MOVING, "init_scale": 1.0}

    def run(group: Group) -> list[Any]:
        params, optimizer = built(group, dynamic_loss_scale=True, dynamic_loss_args=floor)
        before = seen(params, optimizer)
        fill(params, math.inf if place(group) else 1.0)
        raised = 0
        for _ in range(2):
            try:
                optimizer.step()
            except MinimumLossScale:
                raised += 1
        return [raised, seen(params, optimizer) == before]

    assert on_ranks(2, run) == [[2, True]] * 2


def test_a_sparse_gradient_of_one_rank_is_refused_on_all() -> None:
    def run(group: Group) -> list[Any]:
        params, optimizer = built(group)
        before = seen(params, optimizer)
        fill(params, 1.0)
        if place(group) == 1:
            params[0].grad = torch.ones(4, dtype=HALF).to_sparse()
        try:
            optimizer.step()
        except (RuntimeError, ValueError) as error:
            return [seen(params, optimizer) == before, str(error).partition(",")[0]]
        return []

    said = on_ranks(2, run)
    assert [found[0] for found in said] == [True, True]
    assert said[0][1].startswith("another rank")
    assert said[1][1] == "gradient has layout torch.sparse_coo"


def test_a_learning_rate_of_one_rank_that_is_no_number_is_refused_on_all() -> None:
    def run(group: Group) -> list[Any]:
        params, optimizer = built(group, inside="FusedAdam")
        before = seen(params, optimizer)
        fill(params, 1.0)
        if place(group) == 1:
            optimizer.param_groups[0]["lr"] = "fast"
        with pytest.raises((TypeError, ValueError), match="lr='fast'|another rank"):
            optimizer.step()
        return [seen(params, optimizer) == before]

    assert on_ranks(2, run) == [[True]] * 2


def test_ranks_with_other_scales_take_no_step() -> None:
    def run(group: Group) -> list[Any]:
        params, optimizer = built(group)
        before = [bits(param.detach()) for param in params]
        if place(group) == 1:
            optimizer.override_loss_scale(2.0)
        fill(params, 1.0)
        with pytest.raises(ValueError, match="loss scale is 1.0 on one rank and 2.0 on another"):
            optimizer.step()
        return [[bits(param.detach()) for param in params] == before]

    assert on_ranks(2, run) == [[True]] * 2


def test_an_external_scale_divides_what_it_has_multiplied() -> None:
    """None ends it; fields of Compat change nothing, even where the scaler's own scale grows."""
    options: dict[str, Any] = {"dynamic_loss_scale": True, "dynamic_loss_args": MOVING}
    params, optimizer = built(None, (1,), compat=Compat.deepspeed(), **options)
    optimizer.override_loss_scale(16.0)
    assert optimizer.custom_loss_scaler
    optimizer.backward(params[0].float().sum())
    assert optimizer.get_full_hp_grad("p0").item() == 16.0
    optimizer.step()
    assert optimizer.get_global_norm() == 1.0
    assert [moves(params, optimizer, [16.0])[0] for _ in range(3)] == [1.0] * 3
    optimizer.override_loss_scale(None)
    assert optimizer.loss_scale == 8.0
    _, other = built(None, (1,), dtype=BRAIN)
    with pytest.raises(RuntimeError, match="the model is not float16"):
        other.override_loss_scale(2.0)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bf16_optimizer_has_the_same_bits(world: int) -> None:
    """All ranks have the same gradients, whose mean over these numbers of ranks is exact."""

    def run(group: Group) -> bool:
        params, zero = built(group, inside="FusedAdam", dtype=BRAIN)
        twins = [nn.Parameter(param.detach().clone()) for param in params]
        inside = FusedAdam(twins, lr=0.1, weight_decay=0.1)
        names = {twin: f"p{slot}" for slot, twin in enumerate(twins)}
        make: Callable[..., BF16Optimizer] = BF16Optimizer
        brain = make(inside, param_names=names, dp_process_group=group)
        trained(params, zero, range(3))
        for number in range(3):
            for slot, twin in enumerate(twins):
                twin.grad = moderate(twin.numel(), 10 * number + slot, BRAIN)
            brain.update_hp_grads(clear_lp_grads=True)
            brain.step()
        return zero.get_global_norm() == brain.get_global_norm() and all(
            bits(one.detach()) == bits(other.detach())
            and bits(zero.get_full_hp_param(name)) == bits(brain.get_full_hp_param(name))
            for one, (other, name) in zip(params, names.items(), strict=True)
        )

    assert on_ranks(world, run) == [True] * world
