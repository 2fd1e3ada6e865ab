"""LAMB against rational arithmetic, numbers worked by hand, and the properties of its norms."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from tests.oracles.rational import FP32, FP64, norm, power, r32, r64, rounded_root
from twinstep.parity.cases.fixed_inputs import bits, moderate
from twinstep.reference.arithmetic import float64
from twinstep.reference.lamb import lamb_step
from twinstep.reference.parameters import Lists

F = Fraction
HYPER = {
    "lr": 0.0123,
    "beta1": 0.87,
    "beta2": 0.993,
    "eps": 3e-4,
    "weight_decay": 0.07,
    "max_coeff": 10.0,
    "min_coeff": 0.01,
}
DEFAULTS = {**HYPER, "lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}


def call(
    lists: Lists,
    hyper: dict[str, float] = HYPER,
    *,
    factor: float = 1.0,
    found_inf: float = 0.0,
    bias_correction: bool = True,
    eps_inside_sqrt: bool = False,
) -> Lists:
    step: Callable[..., Lists] = lamb_step
    return step(
        *lists,
        **{name: float64(value) for name, value in {**HYPER, **hyper}.items()},
        factor=torch.tensor(factor),
        found_inf=torch.tensor(found_inf),
        bias_correction=bias_correction,
        eps_inside_sqrt=eps_inside_sqrt,
    )


def state(*sizes: int, seed: int = 1, step: int = 0) -> Lists:
    p, g, m, v = (
        [moderate(size, 10 * seed + kind + 100 * i, torch.float32) for i, size in enumerate(sizes)]
        for kind in range(4)
    )
    return p, g, m, [x.abs() for x in v], [], [torch.tensor(step) for _ in sizes]


def fresh(p: list[float], g: list[float]) -> Lists:
    zero = torch.zeros(len(p))
    return [torch.tensor(p)], [torch.tensor(g)], [zero], [zero], [], [torch.tensor(0)]


def rational_lamb(
    lists: Lists, t: int, factor: float, *, inside: bool, corrected: bool
) -> list[list[float]]:
    """One tensor of one step, every operation a fraction rounded once."""
    ps, gs, ms, vs = ([F(x) for x in tensors[0].tolist()] for tensors in lists[:4])
    eps, wd, b1, b2 = (r32(F(HYPER[n])) for n in ("eps", "weight_decay", "beta1", "beta2"))
    c1, c2 = (r32(r64(1 - F(HYPER[n]))) for n in ("beta1", "beta2"))
    k1, k2 = (r64(1 - power(HYPER[n], t)) for n in ("beta1", "beta2"))
    lr = F(HYPER["lr"])
    a = r32(r64(r64(lr * F(rounded_root(k2, FP64))) / k1)) if corrected else r32(lr)
    new_m, new_v, us = [], [], []
    for p, g, m, v in zip(ps, gs, ms, vs, strict=True):
        h = r32(g * r32(F(factor)))
        m = r32(r32(b1 * m) + r32(c1 * h))
        v = r32(r32(b2 * v) + r32(r32(c2 * h) * h))
        outside = r32(F(rounded_root(v, FP32)) + eps)
        d = F(rounded_root(r32(v + eps), FP32)) if inside else outside
        us.append(r32(r32(m / d) + r32(wd * p)))
        new_m.append(float(m))
        new_v.append(float(v))
    rho = min(r32(norm(ps) / norm(us)), r32(F(HYPER["max_coeff"])))
    rho = max(rho, r32(F(HYPER["min_coeff"])))
    r = r32(a * rho)
    new_p = [float(r32(p - r32(r * u))) for p, u in zip(ps, us, strict=True)]
    return [new_p, new_m, new_v]


@pytest.mark.parametrize("inside", [False, True], ids=["eps outside", "eps inside"])
@pytest.mark.parametrize(("t", "corrected"), [(1, True), (3, True), (1000, True), (4, False)])
def test_lamb_equals_rational_arithmetic_bit_for_bit(t: int, corrected: bool, inside: bool) -> None:
    lists = state(40, seed=t, step=t - 1)
    result = call(lists, factor=0.37, bias_correction=corrected, eps_inside_sqrt=inside)
    truth = rational_lamb(lists, t, 0.37, inside=inside, corrected=corrected)
    assert [result[i][0].tolist() for i in range(3)] == truth
    assert result[4][0].item() == t


@pytest.mark.parametrize(
    ("g", "wd", "wanted"),
    [
        ([1.0, 0.0], 0.0, [2.841886, 4.0]),
        ([1.0, 0.0], 0.01, [2.841899, 3.998019]),
        ([0.0, 0.0], 0.01, [2.990513, 3.987351]),
    ],
    ids=["gradient", "gradient and decay", "decay alone"],
)
def test_lamb_gives_the_numbers_worked_by_hand(
    g: list[float], wd: float, wanted: list[float]
) -> None:
    (p,), *_ = call(fresh([3.0, 4.0], g), {**DEFAULTS, "weight_decay": wd})
    # Six decimals were given: half of the last one, and an ULP of fp32.
    assert p.tolist() == pytest.approx(wanted, rel=0, abs=5e-7 + 2.0**-22)


def test_the_ratio_is_bounded_from_both_sides() -> None:
    hyper = {**DEFAULTS, "max_coeff": 2.0, "min_coeff": 0.5}
    large, small = fresh([1e6], [1.0]), fresh([1e-6], [1.0])
    u = 0.1 / (math.sqrt(0.001) + 1e-8)
    for lists, bound in ((large, 2.0), (small, 0.5)):
        (p,), *_ = call(lists, hyper, bias_correction=False)
        moved = lists[0][0].double() - p.double()
        assert moved.item() == pytest.approx(0.1 * bound * u, rel=0.2)


@pytest.mark.parametrize("p", [0.0, -0.0])
def test_weights_of_norm_zero_move_with_ratio_one_whatever_the_bounds(p: float) -> None:
    hyper = {**DEFAULTS, "max_coeff": 0.5, "min_coeff": 0.25}
    (moved,), *_ = call(fresh([p, p], [1.0, -2.0]), hyper, bias_correction=False)
    u = 0.1 / math.sqrt(0.001)
    assert moved.tolist() == pytest.approx([-0.1 * u, 0.1 * u], rel=1e-6)


def test_a_direction_of_norm_zero_changes_nothing() -> None:
    lists = fresh([3.0, -4.0], [0.0, 0.0])
    (p,), _, _, _, (step,) = call(lists, {**DEFAULTS, "min_coeff": 0.5})
    assert bits(p) == bits(lists[0][0])
    assert step.item() == 1


def test_decay_is_scaled_by_the_bias_correction() -> None:
    """The step size carries the correction, so that the decay part gets it too (edge LB-5)."""
    hyper = {**DEFAULTS, "weight_decay": 1.0}
    (with_it,), *_ = call(fresh([1.0], [0.0]), hyper)
    (without,), *_ = call(fresh([1.0], [0.0]), hyper, bias_correction=False)
    ratio = (1.0 - with_it.item()) / (1.0 - without.item())
    assert ratio == pytest.approx(math.sqrt(0.001) / 0.1, rel=1e-5)


def test_a_nan_norm_makes_its_tensor_nan_and_no_other() -> None:
    """Edge LB-6; whoever wants such a step skipped says so with found_inf."""
    p, g, *rest = state(5, 5)
    g[0][2] = torch.nan
    new_p, *_ = call((p, g, *rest))
    assert bool(torch.isnan(new_p[0]).all())
    assert bool(torch.isfinite(new_p[1]).all())


def test_joining_tensors_matters_and_their_order_does_not() -> None:
    lists = state(7, 7, seed=3)
    lists = (lists[0], [lists[1][0], 100 * lists[1][1]], *lists[2:])
    new_p, *_ = call(lists)
    turned, *_ = call(tuple(tensors[::-1] for tensors in lists))
    assert [bits(p) for p in new_p] == [bits(p) for p in turned[::-1]]
    joined = tuple([torch.cat(tensors)] if tensors else [] for tensors in lists[:5])
    (whole,), *_ = call((*joined, [torch.tensor(0)]))
    assert bits(whole) != bits(torch.cat(new_p))


def test_the_ratio_does_not_depend_on_where_elements_stand() -> None:
    lists = state(33, seed=4)
    (p,), *_ = call(lists)
    turned = tuple([tensors[0].flip(0)] if tensors else [] for tensors in lists[:5])
    (flipped,), *_ = call((*turned, lists[5]))
    assert bits(flipped.flip(0)) == bits(p)


def test_an_empty_tensor_stays_empty_and_counts_its_step() -> None:
    """Edge LB-3: upstream launches a kernel without blocks."""
    new_p, _, _, _, new_steps = call(state(3, 0, 2))
    assert [p.numel() for p in new_p] == [3, 0, 2]
    assert [step.item() for step in new_steps] == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_copies_are_written_whatever_the_gradient_is(dtype: torch.dtype) -> None:
    """Edge LB-2: upstream forgets the copy beside an fp32 gradient."""
    lists = state(6)
    copies = [torch.zeros(6, dtype=dtype)]
    (p,), _, _, (copy,), _ = call((*lists[:4], copies, lists[5]))
    assert bits(copy) == bits(p.to(dtype))
