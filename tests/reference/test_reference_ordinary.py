"""AdamW, Adam and SGD with torch's interface have torch's bits; Lion is held to its equation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from twinstep.reference.optimizers.ordinary import SGD, Adam, AdamW, Lion, Ordinary

SHAPES = ((3,), (2, 5), (), (0,), (67,))
GIVEN: list[tuple[type[Ordinary], type[torch.optim.Optimizer], dict[str, Any]]] = [
    (AdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.3}),
    (AdamW, torch.optim.AdamW, {"lr": 0.3, "betas": (0.5, 0.7), "eps": 1e-3, "weight_decay": 0.0}),
    (Adam, torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.3, "betas": (0.0, 0.9)}),
    (Adam, torch.optim.Adam, {}),
    (SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.2}),
    (SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (SGD, torch.optim.SGD, {"momentum": 0.6, "dampening": 0.3}),
]


def parameters(dtype: torch.dtype) -> list[Parameter]:
    source = torch.Generator().manual_seed(7)
    return [Parameter(torch.randn(shape, generator=source).to(dtype)) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("cls", "torchs", "given"), GIVEN)
def test_the_bits_are_torchs(
    cls: type[Ordinary],
    torchs: type[torch.optim.Optimizer],
    given: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    sides = (cls(ours, **given), torchs(theirs, foreach=False, **given))  # type: ignore[call-arg]
    source = torch.Generator().manual_seed(11)
    for turn in range(12):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            grad = torch.randn(one.shape, generator=source).to(dtype) * 10.0 ** -(turn % 5)
            one.grad = None if (turn + index) % 4 == 3 else grad
            other.grad = None if one.grad is None else grad.clone()
        for optimizer in sides:
            optimizer.step()
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other) or one.isnan().any()


def test_lion_is_the_published_one_in_float64() -> None:
    param = Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    optimizer = Lion([param], lr=0.1, betas=(0.9, 0.99), weight_decay=0.2)
    p, m = [1.0, -2.0, 0.5], [0.0, 0.0, 0.0]
    for grad in ([0.3, -0.1, 0.0], [-0.01, 0.2, 0.0], [-5.0, 0.001, 1.0]):
        param.grad = torch.tensor(grad, dtype=torch.float64)
        optimizer.step()
        for at, g in enumerate(grad):
            c = 0.9 * m[at] + 0.1 * g
            sign = (c > 0) - (c < 0)
            p[at] = p[at] - 0.1 * (sign + 0.2 * p[at])
            m[at] = 0.99 * m[at] + 0.01 * g
        assert torch.allclose(param.detach(), torch.tensor(p, dtype=torch.float64), atol=1e-14)


def test_a_closure_has_gradients_and_its_loss_comes_back() -> None:
    param = Parameter(torch.ones(2))
    optimizer = SGD([param], lr=0.5)

    def closure() -> float:
        loss: Tensor = (param * param).sum()
        torch.autograd.backward(loss)
        return float(loss.detach())

    assert optimizer.step(closure) == 2.0
    assert param.tolist() == [0.0, 0.0]
