"""Limbs hold the sum of squares as a rational number, and are rounded once."""

import random
from fractions import Fraction

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from twinstep.fast.kernels._limbs import LIMBS, ORIGIN, PADDED, round_limbs
from twinstep.fast.kernels.reduce import new_limbs, reduce_gradients
from twinstep.parity.cases.fixed_inputs import anything

pytestmark = pytest.mark.usefixtures("replay")


@triton.jit
def round_kernel(limbs, out):
    """Store what the limbs round to."""
    tl.store(out, round_limbs(limbs))


def rounded(limbs: list[int]) -> float:
    """Round limbs on the device."""
    padded = torch.zeros(PADDED.value, dtype=torch.int64)
    padded[: len(limbs)] = torch.tensor(limbs)
    out = torch.zeros((), dtype=torch.float64)
    round_kernel[(1,)](padded, out, enable_fp_fusion=False, num_warps=1)
    return out.item()


def value_of(limbs: list[int]) -> Fraction:
    """Value that limbs stand for."""
    weights = (Fraction(2) ** (32 * (j - ORIGIN.value)) for j in range(LIMBS.value))
    return sum((limb * weight for limb, weight in zip(limbs, weights, strict=False)), Fraction(0))


def at(total: int, limb: int) -> list[int]:
    """Limbs of total * 2**(32 * (limb - ORIGIN)), total at least 0."""
    digits = [0] * limb
    while total:
        digits.append(total % 2**32)
        total //= 2**32
    return digits or [0]


TIES = [2**53 + 1, 2**53 + 3, 2**54 - 1, 2**60 + 2**7, 2**60 + 3 * 2**7, 2**95 + 2**42]


@pytest.mark.parametrize("limb", [0, 1, 7, 11, 17])
@pytest.mark.parametrize("tie", TIES)
def test_a_tie_goes_to_even_and_anything_below_breaks_it(tie: int, limb: int) -> None:
    for total in (tie, tie - 1, tie + 1, tie * 2**40 + 1, tie * 2**70 + 1, tie * 2**70 - 1):
        limbs = at(total, limb)
        assert rounded(limbs) == float(value_of(limbs))


@pytest.mark.parametrize("bits", range(1, 129))
def test_every_length_of_the_leading_digits_is_rounded_right(bits: int) -> None:
    draw = random.Random(bits)
    for limb in (0, 5):
        limbs = at(draw.getrandbits(bits) | 1 << (bits - 1), limb)
        assert rounded(limbs) == float(value_of(limbs))


def test_limbs_need_not_be_normalised() -> None:
    draw = random.Random(1)
    for _ in range(30):
        limbs = [draw.randrange(-(2**61), 2**61) for _ in range(20)] + [2**61]
        assert rounded(limbs) == float(value_of(limbs))


def test_carries_of_two_to_the_40_elements_fit() -> None:
    # 2**28 full tiles of the largest fp32 squares, as far as one limb can be filled by them.
    limbs = [0] * 18 + [2**61 - 1] * 3
    assert rounded(limbs) == float(value_of(limbs))


def test_nothing_is_zero() -> None:
    assert rounded([0]) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 100, 4096, 5000])
def test_limbs_are_the_exact_sum(dtype: torch.dtype, count: int) -> None:
    grad = anything(count, count, dtype)
    grad = torch.where(torch.isfinite(grad), grad, torch.ones_like(grad))
    limbs = new_limbs(torch.device("cpu"))
    reduce_gradients([grad], limbs)
    want = sum((Fraction(x) ** 2 for x in grad.tolist()), Fraction(0))
    assert value_of(limbs[: LIMBS.value].tolist()) == want


def test_limbs_add_to_what_is_there() -> None:
    limbs = new_limbs(torch.device("cpu"))
    pieces: list[Tensor] = [torch.full((3,), 1e-30), torch.full((7,), 1e30)]
    for piece in pieces:
        reduce_gradients([piece], limbs)
    want = sum((Fraction(x) ** 2 for piece in pieces for x in piece.tolist()), Fraction(0))
    assert value_of(limbs[: LIMBS.value].tolist()) == want
