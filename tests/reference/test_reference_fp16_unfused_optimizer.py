"""FP16UnfusedOptimizer: the step, the LAMB path, experts, and what upstream does differently."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from twinstep.contract.compat import CORRECT, Compat
from twinstep.parity.cases.fixed_inputs import bits, moderate
from twinstep.reference.arithmetic import float64
from twinstep.reference.lamb import lamb_step
from twinstep.reference.optimizers.fp16 import FP16Optimizer
from twinstep.reference.optimizers.fp16_unfused import FP16UnfusedOptimizer
from twinstep.reference.optimizers.fused_adam import FusedAdam
from twinstep.reference.optimizers.fused_lamb import FusedLamb
from twinstep.reference.parameters import Lists

UPSTREAM = Compat.deepspeed()
HALF, BRAIN = torch.float16, torch.bfloat16
WINDOW_OF_TWO = {"init_scale": 4.0, "scale_window": 2, "min_scale": 1.0}


def param(values: list[float] | Tensor, dtype: torch.dtype = HALF) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.as_tensor(values, dtype=dtype))


def expert(values: list[float]) -> torch.nn.Parameter:
    made = param(values)
    made.allreduce = False  # type: ignore[attr-defined]
    made.group_name = "ep_size_1"  # type: ignore[attr-defined]
    return made


def around(inside: torch.optim.Optimizer, **options: object) -> FP16UnfusedOptimizer:
    make: Callable[..., FP16UnfusedOptimizer] = FP16UnfusedOptimizer
    return make(inside, **{"verbose": False, **options})


def sgd(*params: torch.nn.Parameter, **options: object) -> FP16UnfusedOptimizer:
    return around(torch.optim.SGD(params, lr=1.0), **options)


def backward(optimizer: FP16UnfusedOptimizer, *terms: Tensor) -> None:
    """Gradients of the sum of the terms, alone."""
    optimizer.zero_grad()
    optimizer.backward(sum((term.float().sum() for term in terms), torch.zeros(())))


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_element_wise_it_is_the_flat_optimizer(dtype: torch.dtype) -> None:
    """With FusedAdam, which looks at no neighbour, both give the same bits."""
    ours, flats = ([param(moderate(n, n, dtype), dtype) for n in (5, 0, 4)] for _ in range(2))
    options: dict[str, object] = {"dynamic_loss_scale": True, "dynamic_loss_args": WINDOW_OF_TWO}
    options |= {"clip_grad": 0.5, "low_precision_dtype": dtype}
    make: Callable[..., FP16Optimizer] = FP16Optimizer
    flat = make(FusedAdam(flats, weight_decay=0.1), **options)
    unfused = around(FusedAdam(ours, weight_decay=0.1), **options)
    for number in range(5):
        for mine, other in zip(ours, flats, strict=True):
            grad = moderate(mine.numel(), number, dtype) * (math.inf if number == 2 else 1.0)
            mine.grad, other.grad = grad, grad.clone()
        unfused.step()
        flat.step()
        assert [bits(p.detach()) for p in ours] == [bits(p.detach()) for p in flats]
        masters = torch.cat([m.detach().reshape(-1) for m in unfused.fp32_groups[0]])
        assert bits(masters) == bits(flat.fp32_groups_flat[0].detach())
        assert (unfused.loss_scale, unfused.overflow) == (flat.loss_scale, flat.overflow)
        assert str(unfused.get_global_norm()) == str(flat.get_global_norm())


@pytest.mark.parametrize("legacy", [False, True], ids=["masters", "legacy"])
@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_both_paths_around_lamb_are_the_operation(dtype: torch.dtype, legacy: bool) -> None:
    params = [param(moderate(n, n, dtype), dtype) for n in (6, 3)]
    wanted = [p.detach().float() for p in params]
    m, v = ([torch.zeros(p.shape) for p in params] for _ in range(2))
    steps = [torch.tensor(0), torch.tensor(0)]
    optimizer = around(
        FusedLamb(params, lr=0.05, weight_decay=0.1),
        static_loss_scale=8.0,
        fused_lamb_legacy=legacy,
    )
    step: Callable[..., Lists] = lamb_step
    hyper = {"lr": 0.05, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    hyper |= {"max_coeff": 10.0, "min_coeff": 0.01}
    for number in range(3):
        grads = [moderate(p.numel(), 9 * number + i, dtype) for i, p in enumerate(params)]
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.clone()
        optimizer.step()
        wanted, m, v, copies, steps = step(
            wanted, grads, m, v, [torch.zeros_like(p) for p in params], steps,
            **{name: float64(value) for name, value in hyper.items()},
            factor=torch.tensor(0.125), found_inf=torch.zeros(()),
            bias_correction=True, eps_inside_sqrt=False,
        )  # fmt: skip
        assert [bits(x.detach()) for x in optimizer.fp32_groups[0]] == [bits(x) for x in wanted]
        assert [bits(p.detach()) for p in params] == [bits(x) for x in copies]


@pytest.mark.parametrize("legacy", [False, True])
def test_the_lamb_path_clips_like_the_other(legacy: bool) -> None:
    params = [param([1.0, 2.0]), param([3.0])]
    optimizer = around(
        FusedLamb(params, lr=0.5), static_loss_scale=4.0, clip_grad=1.0, fused_lamb_legacy=legacy
    )
    backward(optimizer, *[100 * p for p in params])
    optimizer.step()
    inside = optimizer.optimizer.state[optimizer.fp32_groups[0][0]]["exp_avg"]
    assert inside.tolist() == pytest.approx([0.1 / math.sqrt(3.0)] * 2, rel=1e-5)


def test_the_lamb_path_treats_a_missing_gradient_as_zero() -> None:
    used, unused = param([1.0]), param([1.0])
    inside = FusedLamb([used, unused], lr=0.5, weight_decay=0.5)
    optimizer = around(inside, fused_lamb_legacy=True)
    backward(optimizer, used)
    optimizer.step()
    assert unused.item() < 1.0
    assert inside.state[optimizer.fp32_groups[0][1]]["step"].item() == 1


def test_the_lamb_path_needs_an_optimizer_that_takes_gradients() -> None:
    with pytest.raises(TypeError, match="SGD.step takes no grads, output_params, scale"):
        sgd(param([1.0]), fused_lamb_legacy=True)


@pytest.mark.parametrize(("compat", "norm"), [(CORRECT, 2.0), (UPSTREAM, 8.0)])
def test_the_reported_norm_is_that_of_the_true_gradients(compat: Compat, norm: float) -> None:
    """Edge UF-1."""
    weights = param([0.0] * 4)
    optimizer = sgd(weights, static_loss_scale=4.0, compat=compat)
    backward(optimizer, weights)
    optimizer.step()
    assert optimizer.get_global_norm() == norm
    assert weights.tolist() == [-1.0] * 4


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_overflow_skips_the_step_and_drops_gradients(dtype: torch.dtype, legacy: bool) -> None:
    """Edges UF-2, UF-3 and UF-4: in fp16 and bf16, with a static scale that stays."""
    weights = param([1.0, 2.0], dtype)
    inside = FusedLamb([weights])
    optimizer = around(
        inside, static_loss_scale=4.0, low_precision_dtype=dtype, fused_lamb_legacy=legacy
    )
    before = optimizer.loss_scale
    weights.grad = torch.tensor([1.0, math.nan], dtype=dtype)
    optimizer.step()
    assert optimizer.overflow
    assert weights.grad is None
    assert weights.tolist() == [1.0, 2.0]
    assert optimizer.loss_scale == before
    assert not inside.state
    assert math.isnan(optimizer.get_global_norm())


def test_compat_takes_a_step_at_construction() -> None:
    """Edge UF-5: the numbers of LAMB's step with zero gradients and decay."""
    weights = param([3.0, 4.0])
    inside = FusedLamb([weights], lr=0.1, weight_decay=0.01)
    optimizer = around(inside, compat=UPSTREAM)
    (master,) = optimizer.fp32_groups[0]
    assert master.tolist() == pytest.approx([2.990513, 3.987351], abs=1e-6)
    assert weights.tolist() == [3.0, 4.0]
    assert optimizer.state[master]["step"] == torch.tensor(1)


def test_gradients_stay_after_a_step() -> None:
    """Edge UF-9."""
    weights = param([1.0])
    optimizer = sgd(weights, static_loss_scale=4.0)
    backward(optimizer, weights)
    optimizer.step()
    assert weights.grad is not None
    assert weights.grad.item() == 4.0


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    ("compat", "norm"),
    [(CORRECT, 100.0 * math.sqrt(2.0002)), (Compat(clip_without_experts=True), math.sqrt(2.0))],
    ids=["all", "without experts"],
)
def test_experts_count_in_the_norm_that_clips(compat: Compat, norm: float, legacy: bool) -> None:
    """Edge ME-3."""
    shared, special = param([1.0, 1.0]), expert([1.0, 1.0])
    inside = FusedLamb([shared, special]) if legacy else torch.optim.SGD([shared, special], lr=1.0)
    optimizer = around(inside, clip_grad=1.0, fused_lamb_legacy=legacy, compat=compat)
    backward(optimizer, shared, 100 * special)
    optimizer.step()
    assert optimizer.get_global_norm() == pytest.approx(norm, rel=1e-5)


def test_compat_clips_experts_by_the_norm_of_the_others() -> None:
    """The numbers that DeepSpeed's own class gives."""
    shared, special = param([1.0, 1.0]), expert([1.0, 1.0])
    optimizer = sgd(shared, special, clip_grad=1.0, compat=UPSTREAM)
    backward(optimizer, shared, 100 * special)
    optimizer.step()
    assert shared.tolist() == [0.29296875, 0.29296875]
    assert special.tolist() == [-69.6875, -69.6875]


@pytest.mark.parametrize(("compat", "delta"), [(CORRECT, -1.0), (UPSTREAM, -8.0)])
def test_an_external_scale_is_divided_out(compat: Compat, delta: float) -> None:
    weights = param([0.0] * 4)
    optimizer = sgd(weights, compat=compat)
    optimizer.override_loss_scale(8.0)
    backward(optimizer, weights)
    optimizer.step()
    assert weights.tolist() == [delta] * 4


@pytest.mark.parametrize(("compat", "part"), [(CORRECT, 1.0), (UPSTREAM, 0.5)])
def test_a_growth_step_applies_the_whole_gradient(compat: Compat, part: float) -> None:
    weights = param([0.0])
    optimizer = sgd(
        weights, dynamic_loss_scale=True, dynamic_loss_args=WINDOW_OF_TWO, compat=compat
    )
    moved = []
    for _ in range(4):
        before = weights.item()
        backward(optimizer, weights)
        optimizer.step()
        moved.append(before - weights.item())
    assert moved == [1.0, 1.0, part, 1.0]
    assert optimizer.loss_scale == 8.0


def test_defaults_of_the_dynamic_scale() -> None:
    optimizer = sgd(param([1.0]), dynamic_loss_scale=True)
    assert optimizer.loss_scale == 2.0**16
    weights = param([1.0])
    optimizer = sgd(weights, dynamic_loss_scale=True)
    for _ in range(20):
        weights.grad = torch.tensor([math.inf], dtype=HALF)
        optimizer.step()
    assert optimizer.loss_scale == 0.25


def test_frozen_parameters_and_mixed_dtypes() -> None:
    params = [param([1.0]), param([2.0], BRAIN), param([3.0], torch.float32), param([4.0])]
    params[3].requires_grad = False
    optimizer = sgd(*params)
    where = [p.data_ptr() for p in params]
    backward(optimizer, *params[:3])
    optimizer.step()
    assert [p.item() for p in params] == [0.0, 1.0, 2.0, 4.0]
    assert [p.dtype for p in params] == [HALF, BRAIN, torch.float32, HALF]
    assert [p.data_ptr() for p in params] == where
    assert len(optimizer.fp32_groups[0]) == 3
