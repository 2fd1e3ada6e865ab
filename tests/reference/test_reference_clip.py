"""The exact norm against fractions, and both clip formulas against numbers worked by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from tests.oracles.rational import FP32, FP64, rounded, rounded_root
from twinstep.parity.cases.fixed_inputs import anything, moderate
from twinstep.parity.operations.buffers import global_norm
from twinstep.reference.clip import clip_coefficient, clip_factor
from twinstep.reference.norm import l2_norm

NO, YES = torch.tensor(0.0), torch.tensor(1.0)
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def f64(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def norm_of(*values: float) -> float:
    return l2_norm([torch.tensor(values)]).item()


def rational_norm(tensors: list[Tensor]) -> float:
    total = sum((Fraction(x) ** 2 for t in tensors for x in t.tolist()), Fraction(0))
    root = rounded_root(Fraction(rounded(total, FP64)), FP64)
    return rounded(Fraction(root), FP32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_norm_is_the_root_of_the_real_sum(dtype: torch.dtype, seed: int) -> None:
    tensors = [anything(200, seed, dtype), moderate(100, seed, dtype)]
    tensors = [t[torch.isfinite(t)] for t in tensors]
    assert l2_norm(tensors).item() == rational_norm(tensors)


def test_norm_does_not_depend_on_order_or_splitting() -> None:
    x = moderate(999, 3, torch.float32, low=-40, high=40)
    whole = l2_norm([x])
    assert whole == l2_norm([x.flip(0)])
    assert whole == l2_norm([x[700:], x[:0], x[:1], x[1:700]])
    assert whole == l2_norm([x[i : i + 1] for i in range(999)])


def test_norm_does_not_depend_on_earlier_calls() -> None:
    first = l2_norm([moderate(64, 1, torch.float32)])
    l2_norm([moderate(64, 2, torch.float32)] * 3)
    assert first == l2_norm([moderate(64, 1, torch.float32)])


def test_norm_worked_by_hand() -> None:
    assert norm_of(3.0, 4.0) == 5.0
    assert norm_of(2.0**-149) == 2.0**-149
    assert norm_of(*[2.0**127] * 4) == float("inf")
    assert norm_of(1.0, 2.0**-30) == 1.0
    assert l2_norm([torch.full((4,), 2.0**-12), torch.ones(1)]).item() == 1 + 2.0**-23


def test_norm_of_nothing_is_zero() -> None:
    assert l2_norm([]).item() == 0.0
    assert l2_norm([torch.zeros(0)]).item() == 0.0


def test_nonfinite_gradients_give_a_nonfinite_norm() -> None:
    assert norm_of(1.0, float("inf")) == float("inf")
    assert norm_of(1.0, -float("inf")) == float("inf")
    assert torch.isnan(l2_norm([torch.tensor([torch.inf, torch.nan])]))


def test_global_norm_reports_overflow_and_keeps_what_was_known() -> None:
    good, bad = torch.ones(3), torch.tensor([1.0, torch.nan])
    for grads, known, wanted in (([good], NO, 0), ([good], YES, 1), ([good, bad], NO, 1)):
        norm, found = global_norm(grads, norm=f64(7.0).float(), found_inf=known)
        assert (found.item(), torch.isnan(norm).item()) == (wanted, len(grads) == 2)


def test_a_huge_finite_norm_is_no_overflow() -> None:
    norm, found = global_norm([torch.tensor([2.0**127] * 4)], norm=NO, found_inf=NO)
    assert (norm.item(), found.item()) == (float("inf"), 0.0)


def factor_of(norm: float, scale: float, max_norm: float) -> float:
    factor = clip_factor(norm=torch.tensor(norm), scale=f64(scale), max_norm=f64(max_norm))
    assert factor.dtype == torch.float32
    return factor.item()


def coefficient_of(norm: float, max_norm: float) -> float:
    k = clip_coefficient(norm=torch.tensor(norm), max_norm=f64(max_norm))
    assert k.dtype == torch.float32
    return k.item()


def test_clip_factor_only_unscales_below_the_limit() -> None:
    assert factor_of(norm=32.0, scale=8.0, max_norm=5.0) == 0.125
    assert factor_of(norm=32.0, scale=8.0, max_norm=0.0) == 0.125
    assert factor_of(norm=32.0, scale=8.0, max_norm=-1.0) == 0.125
    assert factor_of(norm=0.0, scale=8.0, max_norm=0.0) == 0.125


def test_clip_factor_brings_the_norm_to_the_limit() -> None:
    for norm, scale, limit in ((64.0, 8.0, 2.0), (1e6, 65536.0, 0.3)):
        c = (Fraction(torch.tensor(norm).item()) / Fraction(scale) + Fraction(1e-6)) / Fraction(
            limit
        )
        truth = rounded(1 / (Fraction(scale) * c), FP32)
        got = factor_of(norm, scale, limit)
        # Five float64 roundings can move the last fp32 bit only at a tie.
        assert abs(got - truth) <= 2.0**-24 * truth


def test_clipping_starts_a_millionth_below_the_limit() -> None:
    assert factor_of(norm=1.0, scale=1.0, max_norm=1.0) < 1.0
    assert factor_of(norm=1.0 - 2.0**-19, scale=1.0, max_norm=1.0) == 1.0


def test_a_nan_norm_does_not_clip() -> None:
    assert factor_of(float("nan"), 4.0, 1.0) == 0.25
    assert coefficient_of(float("nan"), 1.0) == 1.0


def test_an_infinite_norm_gives_the_factor_zero() -> None:
    assert factor_of(float("inf"), 4.0, 1.0) == 0.0
    assert coefficient_of(float("inf"), 1.0) == 0.0


def test_clip_coefficient_worked_by_hand() -> None:
    assert coefficient_of(norm=0.5, max_norm=1.0) == 1.0
    assert coefficient_of(norm=5.0, max_norm=0.0) == 1.0
    truth = rounded(Fraction(1) / (5 + Fraction(1e-6)), FP32)
    assert coefficient_of(norm=5.0, max_norm=1.0) == truth


@pytest.mark.parametrize("norm", [0.0, 1e-30, 1.0, 1e30, float("inf"), float("nan")])
def test_clip_coefficient_never_turns_a_gradient_around(norm: float) -> None:
    for max_norm in (-1.0, 0.0, 1e-8, 1.0, 1e8):
        assert 0.0 <= coefficient_of(norm, max_norm) <= 1.0
