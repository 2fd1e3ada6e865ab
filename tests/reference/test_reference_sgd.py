"""SGD against rational arithmetic, torch.optim and numbers worked by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from tests.oracles.counted import Counted
from tests.oracles.rational import FP32, rounded
from twinstep.parity.cases.fixed_inputs import moderate
from twinstep.reference.parameters import Lists
from twinstep.reference.sgd import sgd_step

F = Fraction
HYPER = {"lr": 0.0123, "momentum": 0.87, "dampening": 0.3, "weight_decay": 0.07}


def call(
    lists: Lists,
    hyper: dict[str, float] = HYPER,
    *,
    nesterov: bool = False,
    factor: float = 1.0,
    found_inf: float = 0.0,
) -> Lists:
    def control(name: str) -> Tensor:
        return torch.tensor({**HYPER, **hyper}[name], dtype=torch.float64)

    return sgd_step(
        *lists,
        lr=control("lr"),
        momentum=control("momentum"),
        dampening=control("dampening"),
        weight_decay=control("weight_decay"),
        factor=torch.tensor(factor),
        found_inf=torch.tensor(found_inf),
        nesterov=nesterov,
    )


def state(count: int, seed: int, step: int) -> Lists:
    p, g, b = (moderate(count, seed + i, torch.float32) for i in range(3))
    return [p], [g], [b], [], [torch.tensor(step)]


def r32(x: Fraction) -> Fraction:
    return F(rounded(x, FP32))


def rational_sgd(
    p: float, g: float, b: float, t: int, factor: float, *, nesterov: bool
) -> tuple[float, float]:
    lr, mu, wd = (r32(F(HYPER[name])) for name in ("lr", "momentum", "weight_decay"))
    c = r32(F(1 - HYPER["dampening"]))
    G = r32(r32(F(g) * r32(F(factor))) + r32(wd * F(p)))
    B = G if t == 1 else r32(r32(mu * F(b)) + r32(c * G))
    D = r32(G + r32(mu * B)) if nesterov else B
    return float(r32(F(p) - r32(lr * D))), float(B)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("t", [1, 2, 9])
def test_sgd_equals_rational_arithmetic_bit_for_bit(t: int, nesterov: bool) -> None:
    lists = state(60, 17, t - 1)
    (new_p,), (new_b,), _, (step,) = call(lists, nesterov=nesterov, factor=0.37)
    rows = zip(*(tensors[0].tolist() for tensors in lists[:3]), strict=True)
    truth = [rational_sgd(p, g, b, t, 0.37, nesterov=nesterov) for p, g, b in rows]
    assert new_p.tolist() == [p for p, _ in truth]
    assert new_b.tolist() == [b for _, b in truth]
    assert step.item() == t


def torch_steps(lists: Lists, nesterov: bool, dampening: float) -> list[Tensor]:
    (p,), (g,), (b,), _, (step,) = lists
    param = torch.nn.Parameter(p.double())
    optimizer = torch.optim.SGD(
        [param],
        lr=HYPER["lr"],
        momentum=HYPER["momentum"],
        dampening=dampening,
        weight_decay=HYPER["weight_decay"],
        nesterov=nesterov,
    )
    if step.item():
        optimizer.state[param]["momentum_buffer"] = b.double()
    param.grad = g.double()
    optimizer.step()
    return [param.detach(), optimizer.state[param]["momentum_buffer"]]


def counted_step(lists: Lists, nesterov: bool, dampening: float) -> list[Counted]:
    (p32,), (g32,), (b32,), _, (step,) = lists
    p, g, b = (Counted.exact(x) for x in (p32, g32, b32))
    lr, mu, wd = (Counted.scalar(HYPER[name]) for name in ("lr", "momentum", "weight_decay"))
    g = g + wd * p
    b = mu * b + Counted.scalar(1 - dampening) * g if step.item() else g
    d = g + mu * b if nesterov else b
    return [p - lr * d, b]


@pytest.mark.parametrize("step", [0, 4])
@pytest.mark.parametrize(
    ("nesterov", "dampening"), [(False, 0.0), (False, 0.3), (True, 0.0)], ids=str
)
def test_sgd_agrees_with_torch_within_its_roundings(
    step: int, nesterov: bool, dampening: float
) -> None:
    lists = state(5000, 23, step)
    ours = call(lists, {"dampening": dampening}, nesterov=nesterov)
    truth = torch_steps(lists, nesterov, dampening)
    bounds = counted_step(lists, nesterov, dampening)
    for got, wanted, counted in zip(ours[:2], truth, bounds, strict=True):
        error = (got[0].double() - wanted).abs()
        assert bool((error <= counted.error).all())
        assert float((error / counted.error).max()) > 0.1


def test_the_bound_against_torch_rejects_a_dampened_first_step() -> None:
    lists = state(100, 23, 1)
    wrong = call(lists, {"dampening": 0.3})[0][0]
    right = torch_steps((*lists[:4], [torch.tensor(0)]), False, 0.3)[0]
    counted = counted_step((*lists[:4], [torch.tensor(0)]), False, 0.3)[0]
    assert bool(((wrong.double() - right).abs() > counted.error).any())


def test_plain_gradient_descent_without_momentum_buffers() -> None:
    lists: Lists = ([torch.tensor([2.0])], [torch.tensor([4.0])], [], [], [torch.tensor(3)])
    hyper = {"lr": 0.25, "momentum": 0.5, "weight_decay": 0.0}
    for nesterov in (False, True):
        (p,), momentums, copies, (step,) = call(lists, hyper, nesterov=nesterov, factor=0.5)
        assert (p.item(), momentums, copies, step.item()) == (1.5, [], [], 4)


def test_momentum_worked_by_hand() -> None:
    """G = 1 twice, momentum 1/2: the buffer is 1, then 3/2; p goes 0, -1, -5/2."""
    hyper = {"lr": 1.0, "momentum": 0.5, "dampening": 0.0, "weight_decay": 0.0}
    p, b, step = torch.zeros(1), torch.full((1,), 9.0), torch.tensor(0)
    for wanted in (-1.0, -2.5):
        (p,), (b,), _, (step,) = call(([p], [torch.ones(1)], [b], [], [step]), hyper)
        assert p.item() == wanted
