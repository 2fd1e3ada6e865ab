"""FP16Optimizer: the step, the scale, the skip, and what upstream does differently."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from twinstep.contract.compat import CORRECT, Compat
from twinstep.contract.errors import MinimumLossScale
from twinstep.parity.cases.fixed_inputs import bits, moderate
from twinstep.reference.arithmetic import float64
from twinstep.reference.mixed_step import MixedResult, mixed_step
from twinstep.reference.optimizers.fp16 import FP16Optimizer
from twinstep.reference.optimizers.fused_adam import FusedAdam
from twinstep.reference.optimizers.scalers import DynamicLossScale, StaticLossScale
from twinstep.reference.parameters import Lists

UPSTREAM = Compat.deepspeed()
HALF, BRAIN = torch.float16, torch.bfloat16
WINDOW_OF_TWO = {"init_scale": 4.0, "scale_window": 2, "min_scale": 1.0}


def param(
    values: list[float] | list[list[float]] | Tensor, dtype: torch.dtype = HALF
) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.as_tensor(values, dtype=dtype))


def sgd(
    *params: torch.nn.Parameter,
    lr: float = 1.0,
    weight_decay: float = 0.0,
    **options: object,
) -> FP16Optimizer:
    """Around plain gradient descent, quietly."""
    inside = torch.optim.SGD(params, lr=lr, weight_decay=weight_decay)
    make: Callable[..., FP16Optimizer] = FP16Optimizer
    return make(inside, **{"verbose": False, **options})


def backward(optimizer: FP16Optimizer, *terms: Tensor) -> None:
    """Gradients of the sum of the terms."""
    optimizer.backward(sum((term.float().sum() for term in terms), torch.zeros(())))


@pytest.mark.parametrize("rule", ["static", "dynamic", "wrapper", "torch"])
@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("compat", [CORRECT, Compat(unscale_with_updated_scale=True)])
def test_a_step_is_the_operation_mixed_step(dtype: torch.dtype, rule: str, compat: Compat) -> None:
    """Flat buffers, the scaler and FusedAdam together give the bits of one operation."""
    first, second = param(moderate(6, 1, dtype), dtype), param(moderate(3, 2, dtype), dtype)
    shapes = (first.numel(), second.numel())
    inside = FusedAdam([first, second], lr=0.02, weight_decay=0.1)
    scaler = None if rule == "static" else DynamicLossScale(
        rule=rule, init_scale=8.0, scale_window=1, delayed_shift=1, raise_error_at_min_scale=False
    )  # fmt: skip
    optimizer = FP16Optimizer(
        inside, loss_scale_config=scaler, static_loss_scale=8.0, clip_grad=0.5, compat=compat
    )
    operation: Callable[..., MixedResult] = mixed_step
    p = optimizer.fp32_groups_flat[0].detach().clone()
    m, v, copies = torch.zeros(9), torch.zeros(9), torch.zeros(9, dtype=dtype)
    lists: Lists = ([p], [], [m], [v], [copies], [torch.tensor(0)])
    scaling = optimizer.loss_scaler.state
    for number, overflows in enumerate([False, False, True, False]):
        grad = moderate(9, 7 + number, dtype)
        if overflows:
            grad[4] = torch.inf
        first.grad, second.grad = (part.clone() for part in grad.split(shapes))
        optimizer.step()
        hyper = {"lr": 0.02, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
        result = operation(
            lists[0], [grad], *lists[2:], **{name: float64(x) for name, x in hyper.items()},
            max_norm=float64(0.5), scaling=scaling, rule=optimizer.loss_scaler.rule.after,
            adam_w_mode=True, bias_correction=True, compat=compat,
        )  # fmt: skip
        lists, scaling = (result.lists[0], [], *result.lists[1:]), result.scaling
        assert bits(optimizer.fp32_groups_flat[0].detach()) == bits(lists[0][0])
        if not overflows:
            assert bits(optimizer.fp16_groups_flat[0]) == bits(lists[4][0])
        assert optimizer.loss_scaler.state == scaling
        assert bits(torch.tensor(optimizer.get_global_norm())) == bits(result.norm)
        assert optimizer.overflow is overflows
        state = optimizer.state[optimizer.fp32_groups_flat[0]]
        assert state["step"] == lists[5][0]


def run_window_of_two(compat: Compat) -> list[tuple[float, float, float]]:
    """Scale after, movement of the master and norm, with the true gradient 1."""
    weights = param([0.0] * 4)
    optimizer = sgd(
        weights, dynamic_loss_scale=True, dynamic_loss_args=WINDOW_OF_TWO, compat=compat
    )
    seen = []
    for _ in range(6):
        before = optimizer.fp32_groups_flat[0].detach().clone()
        backward(optimizer, weights)
        optimizer.step()
        moved = (optimizer.fp32_groups_flat[0].detach() - before)[0].item()
        seen.append((optimizer.loss_scale, moved, optimizer.get_global_norm()))
    return seen


def test_a_growth_step_applies_the_whole_gradient() -> None:
    """Edges LS-1 and FP-9."""
    scales = [4.0, 4.0, 8.0, 8.0, 16.0, 16.0]
    assert run_window_of_two(CORRECT) == [(scale, -1.0, 2.0) for scale in scales]


def test_compat_halves_gradient_and_norm_of_a_growth_step() -> None:
    """The numbers that DeepSpeed's own class gives (FP-9)."""
    scales, halves = [4.0, 4.0, 8.0, 8.0, 16.0, 16.0], [1.0, 1.0, 0.5, 1.0, 0.5, 1.0]
    wanted = [(scale, -part, 2 * part) for scale, part in zip(scales, halves, strict=True)]
    assert run_window_of_two(UPSTREAM) == wanted


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bf16_step_with_a_non_finite_gradient_is_skipped(bad: float) -> None:
    """Edge FP-4, as DeepSpeed 0.19.8 does; older versions applied it and said it was skipped."""
    weights = param([1.0, 2.0], BRAIN)
    optimizer = sgd(weights, low_precision_dtype=BRAIN, compat=UPSTREAM)
    weights.grad = torch.tensor([1.0, bad], dtype=BRAIN)
    optimizer.step()
    assert optimizer.overflow
    assert weights.tolist() == [1.0, 2.0]
    assert not math.isfinite(optimizer.get_global_norm())


def test_compat_takes_a_step_at_construction() -> None:
    """Edge FP-1: masters decay once, the counter is 1, and the first update is 0.7441 lr."""
    weights = param([1.0, 1.0])
    inside = FusedAdam([weights], lr=0.1, weight_decay=0.5)
    optimizer = FP16Optimizer(inside, compat=UPSTREAM)
    (master,) = optimizer.fp32_groups_flat
    assert master.tolist() == pytest.approx([0.95, 0.95])
    assert weights.tolist() == [1.0, 1.0]
    assert optimizer.state[master]["step"] == torch.tensor(1)
    weights = param([1.0])
    optimizer = FP16Optimizer(FusedAdam([weights], lr=0.1), compat=UPSTREAM)
    backward(optimizer, weights)
    optimizer.step()
    moved = 1.0 - optimizer.fp32_groups_flat[0].item()
    assert moved / 0.1 == pytest.approx(math.sqrt(1.999) / 1.9, rel=1e-5)


@pytest.mark.parametrize(("compat", "delta"), [(CORRECT, -1.0), (UPSTREAM, -8.0)])
def test_an_external_scale_is_divided_out(compat: Compat, delta: float) -> None:
    """Edges LS-2 and FP-12."""
    weights = param([0.0] * 4)
    optimizer = sgd(weights, compat=compat)
    optimizer.override_loss_scale(8.0)
    assert (optimizer.loss_scale, optimizer.custom_loss_scaler) == (8.0, True)
    backward(optimizer, weights)
    optimizer.step()
    assert weights.tolist() == [delta] * 4
    optimizer.override_loss_scale(None)
    assert (optimizer.loss_scale, optimizer.custom_loss_scaler) == (1.0, False)


def test_the_scaler_goes_on_under_an_external_scale() -> None:
    weights = param([0.0])
    optimizer = sgd(weights, dynamic_loss_scale=True, dynamic_loss_args=WINDOW_OF_TWO)
    optimizer.override_loss_scale(64.0)
    weights.grad = torch.tensor([math.inf], dtype=HALF)
    optimizer.step()
    assert optimizer.loss_scale == 64.0
    assert optimizer.loss_scaler.loss_scale == 2.0


def test_assigning_the_loss_scale_sets_it() -> None:
    """Edge LS-11."""
    weights = param([0.0])
    optimizer = sgd(weights)
    optimizer.loss_scale = 32.0
    backward(optimizer, weights)
    assert weights.grad is not None
    assert weights.grad.item() == 32.0
    optimizer.step()
    assert weights.item() == -1.0


def test_a_loss_that_is_not_scaled_refuses_a_scale() -> None:
    optimizer = sgd(param([0.0], BRAIN), low_precision_dtype=BRAIN, static_loss_scale=64.0)
    assert optimizer.loss_scale == 1.0
    for act in (lambda: optimizer.override_loss_scale(8.0), lambda: setattr_scale(optimizer)):
        with pytest.raises(RuntimeError, match="the loss is not scaled"):
            act()


def setattr_scale(optimizer: FP16Optimizer) -> None:
    optimizer.loss_scale = 8.0


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_that_cannot_be_is_refused(bad: float) -> None:
    optimizer = sgd(param([0.0]))
    with pytest.raises(ValueError, match="but should be positive and finite"):
        optimizer.override_loss_scale(bad)
    with pytest.raises(ValueError, match="but should be positive and finite"):
        optimizer.loss_scale = bad


def test_an_fp16_loss_is_scaled_in_fp32_and_limited_by_its_own_cast() -> None:
    """Edge LS-14: the limit is the cast of an fp16 loss, so that an fp32 loss has none."""
    for loss_dtype, scale, finite in ((HALF, 2.0**15, True), (HALF, 2.0**16, False)):
        weights = param([1.0])
        sgd(weights, static_loss_scale=scale).backward((weights * 0.5).sum().to(loss_dtype))
        assert weights.grad is not None
        assert bool(torch.isfinite(weights.grad).all()) is finite
    weights = param([1.0])
    sgd(weights, static_loss_scale=2.0**16).backward(weights.float().sum() * 0.5)
    assert weights.grad is not None
    assert weights.grad.item() == 2.0**15


def test_an_error_at_the_floor_comes_before_anything_changes() -> None:
    weights = param([1.0])
    scaler = DynamicLossScale(rule="dynamic", init_scale=1.0, delayed_shift=1)
    optimizer = sgd(weights, loss_scale_config=scaler)
    weights.grad = torch.tensor([math.nan], dtype=HALF)
    for _ in range(2):
        with pytest.raises(MinimumLossScale):
            optimizer.step()
        assert weights.grad is not None
        assert optimizer.state_dict()["cur_iter"] == 0


def test_mixed_dtypes_keep_their_dtypes() -> None:
    """Upstream turns every parameter of such a group into fp32."""
    params = [param([1.0], HALF), param([2.0], torch.float32), param([3.0], BRAIN), param([4.0])]
    optimizer = sgd(*params, static_loss_scale=2.0)
    assert [flat.dtype for flat in optimizer.fp16_groups_flat] == [HALF, torch.float32, BRAIN]
    backward(optimizer, *params)
    optimizer.step()
    assert [p.item() for p in params] == [0.0, 1.0, 2.0, 3.0]
    assert [p.dtype for p in params] == [HALF, torch.float32, BRAIN, HALF]
    assert optimizer.fp32_groups_flat[0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_model_weights_are_views_of_the_flat_buffer() -> None:
    params = [param([[1.0, 2.0], [3.0, 4.0]]), param([5.0])]
    optimizer = sgd(*params)
    (flat,) = optimizer.fp16_groups_flat
    assert flat.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    flat += 1
    assert params[0].tolist() == [[2.0, 3.0], [4.0, 5.0]]
    optimizer.refresh_fp32_params()
    assert optimizer.fp32_groups_flat[0].tolist() == [2.0, 3.0, 4.0, 5.0, 6.0]


def test_groups_have_their_own_rate_and_decay() -> None:
    a, b = param([1.0]), param([1.0])
    inside = torch.optim.SGD(
        [{"params": [a], "lr": 1.0}, {"params": [b], "weight_decay": 0.5}], 0.5
    )
    optimizer = FP16Optimizer(inside)
    backward(optimizer, a, b)
    optimizer.step()
    assert (a.item(), b.item()) == (0.0, 0.25)
    optimizer.set_lr(0.125)
    assert [group["lr"] for group in inside.param_groups] == [0.125, 0.125]
    assert optimizer.get_lr() == 0.125


@pytest.mark.parametrize(
    ("norm_type", "norm"), [(2.0, 5.0), (1.0, 7.0), (math.inf, 4.0), (3.0, 91.0 ** (1 / 3))]
)
def test_clipping_uses_the_norm_it_is_told(norm_type: float, norm: float) -> None:
    weights = param([0.0, 0.0])
    optimizer = sgd(weights, clip_grad=0.5, norm_type=norm_type, static_loss_scale=16.0)
    backward(optimizer, weights * torch.tensor([3.0, -4.0]))
    optimizer.step()
    assert optimizer.get_global_norm() == pytest.approx(norm, rel=1e-6)
    assert optimizer.fp32_groups_flat[0].tolist() == pytest.approx(
        [-1.5 / norm, 2.0 / norm], rel=1e-4
    )


def test_defaults_of_the_dynamic_scale() -> None:
    optimizer = sgd(param([1.0]), dynamic_loss_scale=True)
    assert (optimizer.loss_scale, optimizer.dynamic_loss_scale) == (2.0**32, True)
    assert isinstance(optimizer.loss_scale, float)


def test_a_skipped_step_is_logged_with_both_scales(caplog: pytest.LogCaptureFixture) -> None:
    weights = param([1.0])
    args = {**WINDOW_OF_TWO, "init_scale": 0.5, "min_scale": 0.125}
    optimizer = sgd(weights, verbose=True, dynamic_loss_scale=True, dynamic_loss_args=args)
    weights.grad = torch.tensor([math.inf], dtype=HALF)
    with caplog.at_level("INFO"):
        optimizer.step()
    assert "overflow, step skipped: loss scale 0.5 -> 0.25" in caplog.text


def test_a_given_scaler_scales_bf16_too() -> None:
    weights = param([0.0], BRAIN)
    scaler = StaticLossScale(scale=8.0)
    optimizer = sgd(weights, low_precision_dtype=BRAIN, loss_scale_config=scaler)
    backward(optimizer, weights)
    assert weights.grad is not None
    assert weights.grad.item() == 8.0
    optimizer.step()
    assert weights.item() == -1.0
    assert optimizer.state_dict()["cur_scale"] == 8.0
