"""FP16Optimizer around the step: parameters of every kind, groups, norms, hooks, reports."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from twinstep.reference.optimizers.fp16 import FP16Optimizer
from twinstep.reference.optimizers.fused_adam import FusedAdam
from twinstep.reference.optimizers.scalers import StaticLossScale

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


def test_frozen_parameters_are_left_alone() -> None:
    """Edge FP-2: 0.14 let weight decay at them."""
    trained, frozen = param([1.0, 2.0]), param([1.0])
    frozen.requires_grad = False
    optimizer = sgd(trained, frozen, weight_decay=0.5)
    where = frozen.data_ptr()
    backward(optimizer, trained)
    optimizer.step()
    assert trained.tolist() == [-0.5, 0.0]
    assert (frozen.item(), frozen.data_ptr()) == (1.0, where)
    assert optimizer.fp32_groups_flat[0].numel() == 2


def test_a_group_with_nothing_to_train_is_fine() -> None:
    frozen, trained = param([1.0]), param([2.0])
    frozen.requires_grad = False
    groups: list[dict[str, object]] = [{"params": [frozen]}, {"params": [trained]}]
    optimizer = FP16Optimizer(FusedAdam(groups, lr=0.5))
    backward(optimizer, trained)
    optimizer.step()
    assert trained.item() == 1.5


def test_a_parameter_without_gradient_has_a_zero_gradient() -> None:
    """Edge FP-3: weight decay and the decay of moments go on."""
    used, unused = param([1.0]), param([1.0])
    optimizer = sgd(used, unused, weight_decay=0.5)
    backward(optimizer, used)
    optimizer.step()
    assert (used.item(), unused.item()) == (-0.5, 0.5)


def test_a_step_without_any_gradient_is_a_step_with_zero_gradients() -> None:
    """Edge FP-13."""
    weights = param([1.0])
    optimizer = sgd(weights, weight_decay=0.5)
    optimizer.step()
    assert (optimizer.overflow, optimizer.get_global_norm(), weights.item()) == (False, 0.0, 0.5)


def test_empty_parameters_anywhere_change_nothing_for_others() -> None:
    params = [param([]), param([1.0, 2.0]), param([]), param([3.0]), param([])]
    optimizer = sgd(*params)
    backward(optimizer, *params)
    optimizer.step()
    assert [p.tolist() for p in params] == [[], [0.0, 1.0], [], [2.0], []]


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


def test_torch_schedulers_take_it() -> None:
    weights = param([1.0])
    optimizer = sgd(weights, lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(2):
        backward(optimizer, weights)
        optimizer.step()
        schedule.step()
    assert weights.item() == 0.25
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.125


def test_step_hooks_of_torch_run() -> None:
    seen = []
    optimizer = sgd(param([1.0]))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.step()
    assert seen == ["after"]


def test_zero_grad_does_what_it_is_told() -> None:
    weights = param([1.0])
    optimizer = sgd(weights)
    backward(optimizer, weights)
    held = weights.grad
    optimizer.zero_grad(set_to_none=False)
    assert weights.grad is held
    assert weights.grad is not None
    assert weights.grad.item() == 0.0
    optimizer.zero_grad()
    assert weights.grad is None


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


def test_a_sparse_gradient_is_refused() -> None:
    weights = param([1.0, 2.0], torch.float32)
    weights.grad = torch.tensor([1.0, 0.0]).to_sparse()
    with pytest.raises(RuntimeError, match="should be dense"):
        sgd(weights).step()


def test_a_used_optimizer_and_a_later_group_are_refused() -> None:
    weights = param([1.0], torch.float32)
    inside = torch.optim.Adam([weights])
    weights.grad = torch.ones(1)
    inside.step()
    with pytest.raises(ValueError, match="has state of 1 parameters, but should be fresh"):
        FP16Optimizer(inside)
    with pytest.raises(RuntimeError, match="all groups should be there at construction"):
        sgd(param([1.0])).add_param_group({"params": [param([2.0])]})


def test_dynamic_arguments_that_lack_one_are_refused() -> None:
    with pytest.raises(ValueError, match="lacks scale_window, min_scale"):
        sgd(param([1.0]), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 4.0})


def test_defaults_of_the_dynamic_scale() -> None:
    optimizer = sgd(param([1.0]), dynamic_loss_scale=True)
    assert (optimizer.loss_scale, optimizer.dynamic_loss_scale) == (2.0**32, True)
    assert isinstance(optimizer.loss_scale, float)


def test_memory_is_reported_by_kind() -> None:
    weights = param([1.0] * 10)
    optimizer = FP16Optimizer(FusedAdam([weights]))
    backward(optimizer, weights)
    report = optimizer.memory_report()
    assert report == {
        "model_weights": 20, "master_weights": 40, "gradients": 20, "optimizer_state": 0
    }  # fmt: skip
    optimizer.step()
    assert optimizer.memory_report()["optimizer_state"] == 80 + 8


class Clock:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def __call__(self, name: str) -> Clock:
        """Turn to one phase."""
        self.name = name
        return self

    def start(self) -> None:
        """Begin."""
        self.said.append(f"start {self.name}")

    def stop(self) -> None:
        """End."""
        self.said.append(f"stop {self.name}")

    def log(self, names: list[str]) -> None:
        """Report."""
        self.said.append(f"log {len(names)}")


def test_timers_are_called_by_phase_and_logged() -> None:
    weights, clock = param([1.0]), Clock()
    optimizer = sgd(weights, timers=clock)
    backward(optimizer, weights)
    optimizer.step()
    phases = ["overflow_check", "compute_norm", "unscale_and_clip", "basic_step", "update_fp16"]
    assert clock.said == [f"{act} {p}" for p in phases for act in ("start", "stop")] + ["log 5"]
    clock.said.clear()
    weights.grad = torch.tensor([math.inf], dtype=HALF)
    optimizer.step()
    assert clock.said[-1] == "log 2"


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
