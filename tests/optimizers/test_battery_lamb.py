"""FusedLamb of both sides: gradients, copies, scale and limits that the caller hands over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.helpers.battery import Subject, parameters
from tests.helpers.sides import SIDES
from twinstep.parity.cases.fixed_inputs import bits, moderate

pytestmark = [
    pytest.mark.usefixtures("replay"),
    pytest.mark.parametrize("subject", [Subject(side, "FusedLamb") for side in SIDES], ids=str),
]

OPTIONS: dict[str, Any] = {"lr": 0.02, "betas": (0.87, 0.993), "eps": 3e-4, "weight_decay": 0.07}


def test_bounds_of_the_trust_ratio_may_be_equal(subject: Subject) -> None:
    p = Parameter(torch.tensor([3.0, 4.0]))
    p.grad = torch.tensor([1.0, 0.0])
    optimizer = subject([p], lr=0.1, min_coeff=0.5, max_coeff=0.5)
    optimizer.step()
    assert optimizer.get_lamb_coeffs() == [0.5]


def test_coefficients_are_the_trust_ratios_of_the_last_step(subject: Subject) -> None:
    p, q = Parameter(torch.tensor([3.0, 4.0])), Parameter(torch.tensor([1.0]))
    p.grad = torch.tensor([1.0, 0.0])
    optimizer = subject([p, q], lr=0.1)
    optimizer.step()
    assert optimizer.get_lamb_coeffs() == pytest.approx([1.581139], abs=1e-6)
    p.grad = None
    optimizer.step()
    assert optimizer.get_lamb_coeffs() == []


def test_given_gradients_win_and_scale_divides_them(subject: Subject) -> None:
    """A scale may be a tensor, and copies are written."""
    grad = moderate(5, 50, torch.float32)
    plain, *others = (parameters((5,), torch.float32) for _ in range(3))
    plain[0].grad = grad
    subject(plain, **OPTIONS).step()
    for params, scale in zip(others, (8.0, torch.tensor(8.0)), strict=True):
        params[0].grad = torch.full((5,), torch.nan)
        copies = [torch.zeros(5, dtype=torch.float16)]
        subject(params, **OPTIONS).step(grads=[8.0 * grad], output_params=copies, scale=scale)
        assert bits(params[0].detach()) == bits(plain[0].detach())
        assert bits(copies[0]) == bits(plain[0].detach().half())


def test_copies_of_transposed_parameters_are_written_in_their_order(subject: Subject) -> None:
    weight, grad = moderate(12, 1, torch.float32), moderate(12, 2, torch.float32).reshape(4, 3)
    found: list[list[Tensor]] = []
    for params in (weight.reshape(3, 4).t(), weight.reshape(3, 4).t().contiguous()):
        param, copy = Parameter(params.clone()), torch.zeros(4, 3, dtype=torch.float16)
        subject([param], **OPTIONS).step(grads=[grad], output_params=[copy])
        found.append([param.detach(), copy])
    assert not found[0][0].is_contiguous()
    for transposed, plain in zip(*found, strict=True):
        assert torch.equal(transposed, plain)


@pytest.mark.parametrize("known", [False, True], ids=["computed", "given"])
def test_max_grad_norm_clips_each_gradient(subject: Subject, known: bool) -> None:
    """Edge LB-1: without norms upstream raises TypeError; here they are computed."""
    one, two = (Parameter(torch.tensor([3.0, 4.0])) for _ in range(2))
    one.grad, two.grad = torch.tensor([6.0, 8.0]), torch.tensor([0.6, 0.8])
    subject([one], max_grad_norm=1.0).step(grad_norms=[[10.0]] if known else None)
    subject([two]).step()
    assert one.tolist() == pytest.approx(two.tolist(), rel=1e-6)
