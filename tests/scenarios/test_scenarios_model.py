"""The language model: causal, calibrated at the start, differentiable, 16-bit where asked."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from twinstep.scenarios import model, text

SHAPE = model.Shape()


def drawn(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    weights = model.initial_weights(SHAPE, torch.Generator().manual_seed(0))
    return {name: weight.to(dtype) for name, weight in weights.items()}


def window() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return text.batch(text.load().train, size=2, context=SHAPE.context, generator=generator)


def test_model_has_the_size_of_a_real_exercise() -> None:
    numels = [math.prod(size) for size in model.sizes(SHAPE).values()]
    assert 150_000 <= sum(numels) <= 250_000
    assert min(numels) == 1
    assert any(numel % 16 for numel in numels)


def test_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="width=74, but should be a multiple of heads=3"):
        model.Shape(heads=3)


def test_initial_loss_is_that_of_a_uniform_guess() -> None:
    inputs, targets = window()
    found = float(model.loss(SHAPE, drawn(), inputs, targets))
    assert abs(found - math.log(text.VOCABULARY)) < 0.5


def test_a_position_does_not_see_the_future() -> None:
    inputs, _ = window()
    weights = drawn()
    before = model.logits(SHAPE, weights, inputs)
    changed = inputs.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % text.VOCABULARY
    after = model.logits(SHAPE, weights, changed)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:], after[:, 40:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_weight_gets_a_gradient_in_its_own_dtype(dtype: torch.dtype) -> None:
    weights = {name: weight.requires_grad_() for name, weight in drawn(dtype).items()}
    inputs, targets = window()
    loss = model.loss(SHAPE, weights, inputs, targets)
    grads = torch.autograd.grad(loss * 1024.0, list(weights.values()))
    assert loss.dtype == torch.float32
    for name, grad in zip(weights, grads, strict=True):
        assert grad.dtype == dtype
        assert torch.isfinite(grad).all(), name
        assert grad.any(), name


def test_gradient_is_the_slope_of_the_loss() -> None:
    weights = {name: weight.double() for name, weight in drawn().items()}
    inputs, targets = window()
    scale = weights["logit_scale"].requires_grad_()

    def at(value: Tensor) -> Tensor:
        found = model.logits(SHAPE, weights | {"logit_scale": value}, inputs)
        return torch.nn.functional.cross_entropy(found.flatten(0, 1), targets.flatten())

    (slope,) = torch.autograd.grad(at(scale), [scale])
    width = 1e-3
    measured = (at(scale.detach() + width) - at(scale.detach() - width)) / (2 * width)
    # Central differences err by width^2 / 6 times the third derivative: the third cumulant of the
    # logits, far below 1 in a model that still guesses.
    assert abs(float(slope) - float(measured)) < width**2


def test_linear_rounds_a_long_sum_once() -> None:
    x = torch.full((1, 4096), 1.0, dtype=torch.float16)
    weight = torch.full((1, 4096), 0.75, dtype=torch.float16)
    assert model.linear(x, weight).item() == 3072.0


def test_a_high_loss_scale_overflows_fp16_gradients_truly() -> None:
    weights = {name: weight.requires_grad_() for name, weight in drawn(torch.float16).items()}
    inputs, targets = window()
    loss = model.loss(SHAPE, weights, inputs, targets)
    grads = torch.autograd.grad(loss * 2.0**24, list(weights.values()))
    assert any(not torch.isfinite(grad).all() for grad in grads)
