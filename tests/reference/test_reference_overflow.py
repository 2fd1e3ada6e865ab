"""Overflow and unscaling: every element is looked at, and looked at before it is multiplied."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from tests.oracles.rational import BF16, FP16, FP32, rounded
from twinstep.parity.cases.fixed_inputs import bits, from_bits, moderate
from twinstep.parity.operations.buffers import unscale
from twinstep.reference.unscale import any_nonfinite

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
FORMATS = {torch.float16: FP16, torch.bfloat16: BF16, torch.float32: FP32}
EXPONENT_BITS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}
NO, YES = torch.tensor(0.0), torch.tensor(1.0)


@pytest.mark.parametrize("dtype", list(EXPONENT_BITS), ids=str)
def test_any_nonfinite_is_right_for_every_16_bit_pattern(dtype: torch.dtype) -> None:
    mask = EXPONENT_BITS[dtype]
    for pattern in (*range(0, 0x10000, 97), mask, mask | 0x8000, mask | 1, mask - 1):
        x = from_bits([pattern], dtype)
        assert bool(any_nonfinite([x])) == (pattern & mask == mask)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", [0, 499, 999])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_nonfinite_sees_one_bad_element(bad: float, place: int, dtype: torch.dtype) -> None:
    good = moderate(1000, 1, dtype)
    worse = good.clone()
    worse[place] = bad
    assert any_nonfinite([good, good]).item() == 0.0
    assert any_nonfinite([good, worse]).item() == 1.0
    assert any_nonfinite([worse, good]).item() == 1.0


def test_opposite_infinities_are_an_overflow() -> None:
    assert any_nonfinite([torch.tensor([torch.inf, -torch.inf])]).item() == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_finite_gradients_with_an_infinite_sum_are_no_overflow(dtype: torch.dtype) -> None:
    huge = torch.tensor([3e38, 3e38], dtype=dtype)
    assert torch.isinf(huge.sum())
    assert any_nonfinite([huge]).item() == 0.0


def test_nothing_is_no_overflow() -> None:
    assert any_nonfinite([]).item() == 0.0
    assert any_nonfinite([torch.zeros(0), torch.zeros(0).half()]).item() == 0.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unscale_rounds_the_product_to_fp32_and_then_to_storage(dtype: torch.dtype) -> None:
    g = moderate(300, 5, dtype)
    inv = torch.tensor(1 / 3)
    (got,), found = unscale([g], inv_scale=inv, found_inf=NO)
    factor = Fraction(inv.item())
    products = [rounded(Fraction(x) * factor, FP32) for x in g.tolist()]
    assert got.tolist() == [rounded(Fraction(x), FORMATS[dtype]) for x in products]
    assert (got.dtype, found.item()) == (dtype, 0.0)


def test_unscale_looks_before_it_multiplies() -> None:
    finite_before = torch.tensor([2.0**100])
    (got,), found = unscale([finite_before], inv_scale=torch.tensor(2.0**100), found_inf=NO)
    assert torch.isinf(got).all()
    assert found.item() == 0.0
    (got,), found = unscale([torch.tensor([torch.inf])], inv_scale=NO, found_inf=NO)
    assert torch.isnan(got).all()
    assert found.item() == 1.0


def test_unscale_keeps_an_overflow_seen_earlier() -> None:
    _, found = unscale([torch.ones(2)], inv_scale=YES, found_inf=YES)
    assert found.item() == 1.0
    assert unscale([], inv_scale=YES, found_inf=YES)[1].item() == 1.0


def test_unscale_keeps_the_sign_of_zero_and_writes_nothing() -> None:
    g = torch.tensor([-0.0, 0.0, -1.0])
    before = bits(g)
    (got,), _ = unscale([g], inv_scale=torch.tensor(0.5), found_inf=NO)
    assert bits(got)[:2] == bits(torch.tensor([-0.0, 0.0]))
    assert bits(g) == before
