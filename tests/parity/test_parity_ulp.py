"""Distances in ULP, equality of bits, and numbers in print."""

from __future__ import annotations

import pytest
import torch

from twinstep.parity.expected.ulp import decimal, hex_bits, ordered, same, ulp_distance

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("kind", FLOATS, ids=str)
def test_ordered_counts_neighbours_in_steps_of_one(kind: torch.dtype) -> None:
    x = torch.tensor([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0], dtype=kind)
    up = torch.nextafter(x, torch.full_like(x, torch.inf))
    assert (ordered(up) - ordered(x)).tolist() == [1] * 6


def test_ulp_distance_of_nan_and_number_is_no_distance() -> None:
    nan, one = torch.tensor([torch.nan]), torch.tensor([1.0])
    assert ulp_distance(nan, nan).item() == 0
    assert ulp_distance(nan, one).item() == -1
    assert ulp_distance(one, nan).item() == -1


def test_ulp_distance_to_infinity_is_one_step_beyond_the_largest() -> None:
    largest = torch.tensor([torch.finfo(torch.float32).max])
    assert ulp_distance(torch.tensor([torch.inf]), largest).item() == 1


def test_same_rejects_a_flipped_sign_of_zero() -> None:
    assert not same(torch.tensor([0.0]), torch.tensor([-0.0])).item()


def test_same_rejects_one_ulp_and_accepts_any_nan_payload() -> None:
    one = torch.tensor([1.0])
    assert not same(torch.nextafter(one, one + 1), one).item()
    other = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
    assert same(other, torch.tensor([torch.nan])).item()


def test_hex_bits_keep_the_width_of_the_dtype() -> None:
    assert hex_bits(torch.tensor(1.0, dtype=torch.bfloat16)) == "0x3f80"
    assert hex_bits(torch.tensor(-0.0)) == "0x80000000"


def test_decimal_names_a_number_among_its_neighbours() -> None:
    third = torch.tensor(1 / 3)
    assert torch.tensor(float(decimal(third))) == third
    assert decimal(torch.tensor(torch.nan)) == "nan"
