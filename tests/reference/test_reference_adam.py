"""Adam and AdamW against rational arithmetic, torch.optim and numbers worked by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from tests.oracles.counted import Counted
from tests.oracles.rational import BF16, FP16, FP32, FP64, rounded, rounded_root
from twinstep.parity.cases.fixed_inputs import moderate
from twinstep.reference.adam import adam_step, adamw_step
from twinstep.reference.parameters import Lists

F = Fraction
HYPER = {"lr": 0.0123, "beta1": 0.87, "beta2": 0.993, "eps": 3e-7, "weight_decay": 0.07}
FORMATS = {torch.float16: FP16, torch.bfloat16: BF16, torch.float32: FP32}
STEPS = {False: adam_step, True: adamw_step}


def f64(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def call(
    step: Callable[..., Lists],
    lists: Lists,
    *,
    factor: float = 1.0,
    found_inf: float = 0.0,
    bias_correction: bool = True,
    hyper: Mapping[str, float] = HYPER,
) -> Lists:
    controls = {name: f64(value) for name, value in {**HYPER, **hyper}.items()}
    return step(
        *lists,
        **controls,
        factor=torch.tensor(factor),
        found_inf=torch.tensor(found_inf),
        bias_correction=bias_correction,
    )


def state(count: int, seed: int, grad: torch.dtype = torch.float32) -> Lists:
    p = moderate(count, seed, torch.float32)
    g = moderate(count, seed + 1, grad)
    m = moderate(count, seed + 2, torch.float32)
    v = moderate(count, seed + 3, torch.float32, low=-12, high=0).abs()
    return [p], [g], [m], [v], [], [torch.tensor(2)]


def r32(x: Fraction) -> Fraction:
    return F(rounded(x, FP32))


def once(x: float) -> Fraction:
    """A Python number rounded once to fp32."""
    return r32(F(x))


def rational_k(beta: float, t: int) -> Fraction:
    power = F(1)
    square, e = F(beta), t
    while e:
        if e & 1:
            power = F(rounded(power * square, FP64))
        square, e = F(rounded(square * square, FP64)), e >> 1
    return once(rounded(1 - power, FP64))


def rational_adam(
    p: float, g: float, m: float, v: float, t: int, *, factor: float, decoupled: bool
) -> tuple[Fraction, Fraction, Fraction]:
    """One element of one step, every operation a fraction rounded once to fp32."""
    lr, eps, wd = once(HYPER["lr"]), once(HYPER["eps"]), once(HYPER["weight_decay"])
    b1, b2 = once(HYPER["beta1"]), once(HYPER["beta2"])
    c1 = once(rounded(1 - F(HYPER["beta1"]), FP64))
    c2 = once(rounded(1 - F(HYPER["beta2"]), FP64))
    P, G = F(p), r32(F(g) * once(factor))
    if not decoupled:
        G = r32(G + r32(wd * P))
    M = r32(r32(b1 * F(m)) + r32(c1 * G))
    V = r32(r32(b2 * F(v)) + r32(r32(c2 * G) * G))
    root = F(rounded_root(r32(V / rational_k(HYPER["beta2"], t)), FP32))
    U = r32(r32(M / rational_k(HYPER["beta1"], t)) / r32(root + eps))
    if decoupled:
        U = r32(U + r32(wd * P))
    return r32(P - r32(lr * U)), M, V


@pytest.mark.parametrize("decoupled", [False, True], ids=["adam", "adamw"])
@pytest.mark.parametrize("t", [1, 2, 3, 1000])
def test_adam_equals_rational_arithmetic_bit_for_bit(decoupled: bool, t: int) -> None:
    (p,), (g,), (m,), (v,), _, _ = lists = state(40, 100 * t)
    lists = (*lists[:5], [torch.tensor(t - 1)])
    (new_p,), (new_m,), (new_v,), _, (step,) = call(STEPS[decoupled], lists, factor=0.0123)
    rows = zip(p.tolist(), g.tolist(), m.tolist(), v.tolist(), strict=True)
    truth = [rational_adam(*row, t, factor=0.0123, decoupled=decoupled) for row in rows]
    assert new_p.tolist() == [float(P) for P, _, _ in truth]
    assert new_m.tolist() == [float(M) for _, M, _ in truth]
    assert new_v.tolist() == [float(V) for _, _, V in truth]
    assert step.item() == t


def torch_step(lists: Lists, decoupled: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The same step by torch.optim in float64, from the same state."""
    (p,), (g,), (m,), (v,), _, (step,) = lists
    param = torch.nn.Parameter(p.double())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    betas = (HYPER["beta1"], HYPER["beta2"])
    optimizer = kind(
        [param], lr=HYPER["lr"], betas=betas, eps=HYPER["eps"], weight_decay=HYPER["weight_decay"]
    )
    optimizer.state[param] = {
        "step": step.float(),
        "exp_avg": m.double(),
        "exp_avg_sq": v.double(),
    }
    param.grad = g.double()
    optimizer.step()
    after = optimizer.state[param]
    return param.detach(), after["exp_avg"], after["exp_avg_sq"]


def counted_step(lists: Lists, decoupled: bool, t: int) -> list[Counted]:
    """The equation in float64 with the roundings of fp32 counted: value and error bound."""
    (p32,), (g32,), (m32,), (v32,), *_ = lists
    p, g, m, v = (Counted.exact(x) for x in (p32, g32, m32, v32))
    lr, eps, wd = (Counted.scalar(HYPER[name]) for name in ("lr", "eps", "weight_decay"))
    b1, b2 = HYPER["beta1"], HYPER["beta2"]
    k1, k2 = Counted.scalar(1 - b1**t), Counted.scalar(1 - b2**t)
    if not decoupled:
        g = g + wd * p
    m = Counted.scalar(b1) * m + Counted.scalar(1 - b1) * g
    v = Counted.scalar(b2) * v + (Counted.scalar(1 - b2) * g) * g
    u = (m / k1) / ((v / k2).sqrt() + eps)
    if decoupled:
        u = u + wd * p
    return [p - lr * u, m, v]


@pytest.mark.parametrize("decoupled", [False, True], ids=["adam", "adamw"])
@pytest.mark.parametrize("grad", list(FORMATS), ids=str)
def test_adam_agrees_with_torch_within_its_roundings(decoupled: bool, grad: torch.dtype) -> None:
    lists = state(5000, 7, grad)
    ours = call(STEPS[decoupled], lists)
    for got, wanted, counted in zip(
        ours[:3], torch_step(lists, decoupled), counted_step(lists, decoupled, 3), strict=True
    ):
        error = (got[0].double() - wanted).abs()
        assert bool((error <= counted.error).all())
        assert float((error / counted.error).max()) > 0.1


def test_the_bound_against_torch_rejects_the_other_weight_decay() -> None:
    lists = state(100, 7)
    wrong = torch_step(lists, decoupled=True)[0]
    counted = counted_step(lists, False, 3)[0]
    error = (call(adam_step, lists)[0][0].double() - wrong).abs()
    assert bool((error > counted.error).any())


def test_first_update_is_the_learning_rate_times_the_sign() -> None:
    zeros = torch.zeros(3)
    g = torch.tensor([4.0, -0.5, 1.0])
    lists: Lists = ([torch.ones(3)], [g], [zeros], [zeros], [], [torch.tensor(0)])
    hyper = {"lr": 0.25, "beta1": 0.5, "beta2": 0.75, "eps": 0.0, "weight_decay": 0.0}
    (p,), *_ = call(adamw_step, lists, hyper=hyper)
    assert p.tolist() == [0.75, 1.25, 0.75]


def test_weight_decay_is_coupled_in_adam_and_decoupled_in_adamw() -> None:
    """P 1, g 0.25, lr 0.1, wd 0.5 moves to 0.90 with Adam and to 0.85 with AdamW."""
    for step, wanted in ((adam_step, 0.90), (adamw_step, 0.85)):
        zero = torch.zeros(1)
        lists: Lists = (
            [torch.ones(1)],
            [torch.tensor([0.25])],
            [zero],
            [zero],
            [],
            [torch.tensor(0)],
        )
        hyper = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.5}
        (p,), *_ = call(step, lists, hyper=hyper)
        # Ten fp32 roundings of numbers near 1.
        assert abs(p.item() - wanted) <= 10 * 2.0**-24 + 1e-8


def test_negative_weight_decay_is_applied() -> None:
    zero = torch.zeros(1)
    lists: Lists = ([torch.ones(1)], [zero], [zero], [zero], [], [torch.tensor(0)])
    (p,), *_ = call(adamw_step, lists, hyper={"lr": 0.5, "weight_decay": -0.5})
    assert p.item() == 1.25


def test_without_bias_correction_the_moments_are_used_as_they_are() -> None:
    zero, g = torch.zeros(1), torch.tensor([1.0])
    lists: Lists = ([torch.ones(1)], [g], [zero], [zero], [], [torch.tensor(0)])
    hyper = {"lr": 0.5, "beta1": 0.5, "beta2": 0.75, "eps": 0.5, "weight_decay": 0.0}
    (p,), (m,), (v,), *_ = call(adam_step, lists, bias_correction=False, hyper=hyper)
    assert (p.item(), m.item(), v.item()) == (0.75, 0.5, 0.25)


def test_nonfinite_gradients_propagate_when_the_step_is_not_skipped() -> None:
    ones, zeros = torch.ones(3), torch.zeros(3)
    g = torch.tensor([torch.inf, torch.nan, 1.0])
    (p,), (m,), (v,), *_ = call(adamw_step, ([ones], [g], [zeros], [zeros], [], [torch.tensor(0)]))
    assert torch.isfinite(p).tolist() == [False, False, True]
    assert v.tolist()[0] == torch.inf
