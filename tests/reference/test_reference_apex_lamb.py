"""apex's LAMB against rational arithmetic, and against its documented algorithm in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.oracles.apex_lamb import ApexLambOracle, Group, Tensors
from tests.oracles.rational import FP32, norm, power, r32, r64, rounded_root
from twinstep.parity.cases.fixed_inputs import bits, moderate
from twinstep.reference.apex_lamb import apex_lamb_step, clip_divisor
from twinstep.reference.arithmetic import float64
from twinstep.reference.optimizers.apex_lamb import FusedLAMB
from twinstep.reference.parameters import Lists

F = Fraction
HYPER = {"lr": 0.0123, "beta1": 0.87, "beta2": 0.993, "eps": 3e-4, "weight_decay": 0.07}
HYPER |= {"max_norm": 0.7}
NAMES = ("bias_correction", "adam_w_mode", "grad_averaging", "use_nvlamb")
CHOICES = list(itertools.product((True, False), repeat=4))
CHOSEN = pytest.mark.parametrize("choices", CHOICES, ids=lambda row: "".join("ft"[x] for x in row))


def state(size: int, *, seed: int = 1, step: int = 0) -> Lists:
    p, g, m, v = ([moderate(size, 10 * seed + kind, torch.float32)] for kind in range(4))
    return p, g, m, [v[0].abs()], [], [torch.tensor(step)]


def call(
    lists: Lists,
    choices: tuple[bool, ...],
    *,
    norm: float = 5.3,
    factor: float = 0.37,
    **hyper: float,
) -> Lists:
    step: Callable[..., Lists] = apex_lamb_step
    return step(
        *lists,
        **{name: float64(value) for name, value in {**HYPER, **hyper}.items()},
        norm=torch.tensor(norm),
        factor=torch.tensor(factor),
        found_inf=torch.tensor(0.0),
        **dict(zip(NAMES, choices, strict=True)),
    )


def rational(lists: Lists, t: int, choices: tuple[bool, ...], wd: float) -> list[list[float]]:
    """One tensor of one step, every operation a fraction rounded once."""
    corrected, decoupled, averaging, nvlamb = choices
    ps, gs, ms, vs = ([F(x) for x in tensors[0].tolist()] for tensors in lists[:4])
    eps, b1, b2, decay = (r32(F(x)) for x in (HYPER["eps"], HYPER["beta1"], HYPER["beta2"], wd))
    c1, c2 = (r32(r64(1 - F(HYPER[n]))) for n in ("beta1", "beta2"))
    b3 = c1 if averaging else F(1)
    k1, k2 = (r32(r64(1 - power(HYPER[n], t))) for n in ("beta1", "beta2"))
    if not corrected:
        k1 = k2 = F(1)
    factor, largest = r32(F(0.37)), r32(F(HYPER["max_norm"]))
    divisor = r32(r32(r32(F(5.3)) * factor) / largest)
    new_m, new_v, us = [], [], []
    for p, g, m, v in zip(ps, gs, ms, vs, strict=True):
        h = r32(r32(g * factor) / divisor)
        h = h if decoupled else r32(h + r32(decay * p))
        m = r32(r32(b1 * m) + r32(b3 * h))
        v = r32(r32(b2 * v) + r32(r32(c2 * h) * h))
        root = F(rounded_root(r32(v / k2), FP32))
        u = r32(r32(m / k1) / r32(root + eps))
        us.append(r32(u + r32(decay * p)) if decoupled else u)
        new_m.append(float(m))
        new_v.append(float(v))
    rho = r32(norm(ps) / norm(us)) if nvlamb or wd else F(1)
    length = r32(r32(F(HYPER["lr"])) * rho)
    return [[float(r32(p - r32(length * u))) for p, u in zip(ps, us, strict=True)], new_m, new_v]


@CHOSEN
def test_a_step_equals_rational_arithmetic_bit_for_bit(choices: tuple[bool, ...]) -> None:
    for t, wd in ((1, 0.07), (3, 0.0)):
        lists = state(24, seed=t, step=t - 1)
        result = call(lists, choices, weight_decay=wd)
        assert [result[at][0].tolist() for at in range(3)] == rational(lists, t, choices, wd)
        assert result[4][0].item() == t


def drawn(seed: int, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw) for shape in shapes]


@CHOSEN
def test_three_steps_are_those_of_the_documented_algorithm(choices: tuple[bool, ...]) -> None:
    """Two groups, one without decay, a missing gradient, a clipped step and one that is not."""
    shapes: list[list[tuple[int, ...]]] = [[(5, 7), (3,)], [(11,)]]
    more: list[dict[str, Any]] = [{"lr": 0.02}, {"weight_decay": 0.0, "eps": 1e-3}]
    options: dict[str, Any] = dict(zip(NAMES, choices, strict=True))
    of_class = {name: options.pop(name) for name in ("adam_w_mode", "use_nvlamb")}
    params = [[Parameter(x) for x in drawn(at, row)] for at, row in enumerate(shapes)]
    oracle = ApexLambOracle(
        [
            Group([Tensors(p.detach().double().numpy()) for p in row], **options, **own)
            for row, own in zip(params, more, strict=True)
        ],
        max_grad_norm=2.5,
        **of_class,
    )
    ours = FusedLAMB(
        [{"params": row, **own} for row, own in zip(params, more, strict=True)],
        max_grad_norm=2.5,
        **options,
        **of_class,
    )
    for number, size in enumerate((1.0, 0.1, 3.0)):
        grads = [[size * x for x in drawn(10 * number + at, row)] for at, row in enumerate(shapes)]
        given = [[g.double().numpy() for g in row] for row in grads]
        for row, news in zip(params, grads, strict=True):
            for param, grad in zip(row, news, strict=True):
                param.grad = grad
        if number == 1:
            params[0][1].grad, given[0][1] = None, None  # type: ignore[call-overload]
        ours.step()
        oracle.step(given)
    for row, group in zip(params, oracle.groups, strict=True):
        for param, held in zip(row, group.tensors, strict=True):
            got = (param.detach(), *ours.state[param].values())
            for mine, truth in zip(got, (held.weight, held.m, held.v), strict=True):
                # Some fifteen roundings of 2^-24 a step, three steps, and sums that cancel.
                np.testing.assert_allclose(mine.numpy(), truth, rtol=1e-5, atol=1e-6)
    assert [group["step"] for group in ours.param_groups] == [3, 3]


def test_the_oracle_tells_every_choice_from_its_opposite() -> None:
    found = set()
    for choices in CHOICES:
        options: dict[str, Any] = dict(zip(NAMES, choices, strict=True))
        of_class = {name: options.pop(name) for name in ("adam_w_mode", "use_nvlamb")}
        rows = [drawn(1, [(6,)])[0].double().numpy() for _ in range(2)]
        groups = [
            Group([Tensors(row)], weight_decay=wd, **options)
            for row, wd in zip(rows, (0.3, 0), strict=True)
        ]
        oracle = ApexLambOracle(groups, **of_class)
        for seed in (2, 3):
            oracle.step([[x.double().numpy()] for x in drawn(seed, [(6,), (6,)])])
        # A trust ratio hides by what all of a direction is multiplied; the moments do not.
        held = [g.tensors[0] for g in groups]
        found.add(tuple(float(x[0]) for each in held for x in (each.weight, each.m)))
    assert len(found) == len(CHOICES)


@pytest.mark.parametrize(
    ("norm", "largest", "divisor"),
    [
        (3.0, 1.5, 2.0),
        (1.5, 1.5, 1.0),
        (1.0, 1.5, 1.0),
        (3.0, 0.0, 1.0),
        (3.0, -1.0, 1.0),
        (float("inf"), 1.5, float("inf")),
        (float("nan"), 1.5, 1.0),
    ],
)
def test_gradients_are_divided_where_their_norm_is_too_large(
    norm: float, largest: float, divisor: float
) -> None:
    assert clip_divisor(torch.tensor(norm), float64(largest)).item() == divisor


@pytest.mark.parametrize("zero", [0, 1], ids=["weights", "direction"])
def test_the_ratio_is_one_where_a_norm_is_zero(zero: int) -> None:
    lists = state(4)
    for at in (0,) if zero == 0 else (1, 2):
        lists[at][0] = torch.zeros(4)
    plain = call(lists, (True, False, True, False), weight_decay=0.0)
    nvlamb = call(lists, (True, False, True, True), weight_decay=0.0)
    assert bits(plain[0][0]) == bits(nvlamb[0][0])
