"""Sums of squares within a window are exact, and whatever does not fit is seen."""

import math
from fractions import Fraction

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from twinstep.fast.kernels._limbs import LIMBS, ORIGIN
from twinstep.fast.kernels._squares import (
    SUMS,
    add_squares,
    constants_of,
    no_squares,
    window_above,
)
from twinstep.fast.kernels.reduce import SPAN, new_limbs, reduce_gradients

pytestmark = pytest.mark.usefixtures("replay")
CPU = torch.device("cpu")
BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}
DTYPES = list(BITS)
LANES = SUMS.value


@triton.jit
def lanes_kernel(x, exponent, sums, outside, BITS: tl.constexpr):
    """The sums of lanes that get one number each, and whether it did not fit."""
    at = tl.program_id(0) * SUMS + tl.arange(0, SUMS)
    s0, s1, s2 = no_squares()
    zero = tl.zeros([SUMS], tl.int32)
    number = tl.load(x + at).to(tl.float32)
    c = constants_of(exponent, BITS)
    s0, s1, s2, above, below = add_squares(s0, s1, s2, zero, zero, number, c, BITS)
    tl.store(sums + 3 * at, s0)
    tl.store(sums + 3 * at + 1, s1)
    tl.store(sums + 3 * at + 2, s2)
    high = above >> (23 if BITS == 24 else 24)
    tl.store(outside + at, ((high | below) != 0).to(tl.int32))


@triton.jit
def window_kernel(largest, window, BITS: tl.constexpr):
    """The window for a largest magnitude."""
    tl.store(window, window_above(tl.load(largest), BITS))


def squares(x: Tensor, exponent: int) -> tuple[list[list[int]], list[int]]:
    """Sums of every lane, and which numbers did not fit."""
    sums = torch.zeros(len(x), 3, dtype=torch.int64)
    outside = torch.zeros(len(x), dtype=torch.int32)
    lanes_kernel[(len(x) // LANES,)](
        x, exponent, sums, outside, BITS[x.dtype], num_warps=8, enable_fp_fusion=False
    )
    return sums.tolist(), outside.tolist()


def units(exponent: int, bits: int) -> tuple[int, int, int]:
    """Exponents of the weights of the three sums."""
    if bits == 24:
        return 2 * exponent - 46, 2 * exponent - 73, 2 * exponent - 102
    return 2 * exponent - 48, 2 * exponent - 98 + 2 * bits, 0


def scaled(x: float, exponent: int) -> int | None:
    """Quotient of x and 2**exponent if that is an integer."""
    value = Fraction(x) / Fraction(2) ** exponent
    return value.numerator if value.denominator == 1 else None


def check_lanes(x: Tensor, exponent: int) -> int:
    """Compare every lane with integers; the number of those that fit."""
    bits = BITS[x.dtype]
    least = exponent - 51 if bits == 24 else exponent - 49 + bits
    weights = [weight - 2 * least for weight in units(exponent, bits)]
    fitting = 0
    for number, sums, outside in zip(x.tolist(), *squares(x, exponent), strict=True):
        multiple = scaled(number, least) if math.isfinite(number) else None
        if outside:
            # fp32 numbers that round up to the window's end are outside too.
            edge = 2.0 ** (exponent - 24) if bits == 24 else 0.0
            assert multiple is None or abs(number) >= 2.0**exponent - edge, number
            continue
        assert multiple is not None, number
        fitting += 1
        if bits < 24:
            sums[1] -= 1 << 48
        total = sum(s * 2 ** max(weight, 0) for s, weight in zip(sums, weights, strict=True) if s)
        assert total == multiple**2, number
    return fitting


@pytest.mark.parametrize(
    ("dtype", "exponent", "fitting"),
    [
        (torch.bfloat16, -96, None),
        (torch.bfloat16, 19, 2 * 34 * 128 + 2),
        (torch.float16, 16, None),
    ],
)
def test_every_16_bit_pattern(dtype: torch.dtype, exponent: int, fitting: int | None) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    found = check_lanes(every, exponent)
    if fitting is not None:
        # 34 binades of both signs and zeros; below them multiples of the least unit fit as well.
        assert found >= fitting


@pytest.mark.parametrize("exponent", [-96, -40, 0, 3, 60, 120])
def test_fp32_numbers_around_the_edges_of_a_window(exponent: int) -> None:
    draw = torch.Generator().manual_seed(exponent + 200)
    bits = torch.randint(-(2**31), 2**31, (2 * LANES,), generator=draw).to(torch.int32)
    anything = bits.view(torch.float32)
    near = torch.rand(2 * LANES, generator=draw) + 0.5
    shifts = torch.randint(-56, 3, (2 * LANES,), generator=draw)
    values = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, 2.0 - 2**-23, 0.5 + 2**-24, 2**-28]
    special = torch.tensor([*values, *[1 + k * 2**-23 for k in range(LANES - len(values))]])
    scale = 2.0 ** (exponent - 1)
    x = torch.cat([anything, torch.ldexp(near, shifts) * scale, special * scale, -special * scale])
    assert check_lanes(x, exponent) > LANES


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_window_holds_the_largest_number_that_it_is_made_for(dtype: torch.dtype) -> None:
    window = torch.zeros((), dtype=torch.int32)
    for value in (1.0, 1.99, 2.0**-14, 2.0**-90, 2.0**15, 3e4):
        largest = torch.tensor(value, dtype=dtype).float().view(torch.int32)
        window_kernel[(1,)](largest, window, BITS[dtype], num_warps=1)
        x = torch.full((LANES,), value, dtype=dtype)
        assert check_lanes(x, int(window)) == LANES


def value_of(limbs: Tensor) -> Fraction:
    """Sum that limbs hold."""
    digits = limbs[: LIMBS.value].tolist()
    return sum(
        (digit * Fraction(2) ** (32 * (j - ORIGIN.value)) for j, digit in enumerate(digits)),
        Fraction(0),
    )


def check_sum(*grads: Tensor) -> None:
    """The limbs of these gradients hold the sum of their finite squares."""
    limbs = new_limbs(CPU)
    reduce_gradients(grads, limbs)
    want = Fraction(0)
    for grad in grads:
        parts, exponents = torch.frexp(grad.double())
        square = (parts * 2**24).long() ** 2
        for exponent in exponents.unique().tolist():
            some = square[exponents == exponent]
            total = int((some >> 24).sum()) * 2**24 + int((some & (2**24 - 1)).sum())
            want += total * Fraction(4) ** (exponent - 24)
    assert value_of(limbs) == want


@pytest.fixture
def one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program, whose sums are carried from span to span."""
    monkeypatch.setattr("twinstep.fast.kernels.reduce.resident_programs", lambda *_: 1)


@pytest.mark.usefixtures("one_program")
@pytest.mark.parametrize("dtype", DTYPES)
def test_spans_that_leave_the_window_and_come_back(dtype: torch.dtype) -> None:
    sizes = [0, -3, -30, 4, -14] if dtype != torch.float16 else [0, 15, -20, 3, -24]
    draw = torch.Generator().manual_seed(1)
    spans = [torch.randn(SPAN.value, generator=draw).clamp(-1.9, 1.9) * 2.0**s for s in sizes]
    spans[2][:5000] = 0
    whole = torch.cat([*spans, spans[1][:9999]]).to(dtype)
    check_sum(whole)
    check_sum(torch.zeros(20000, dtype=dtype), whole[1:50001])


@pytest.mark.usefixtures("one_program")
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_maxima_do_not_overflow_a_lane(dtype: torch.dtype) -> None:
    # 2048 additions for each lane. The fp32 number's lower digits are as large as they can be.
    value = 1 + 2.0**-21 if dtype == torch.float32 else torch.finfo(dtype).max / 2**112
    check_sum(torch.full((2**20,), value, dtype=torch.float64).to(dtype))


def test_a_lane_has_room_for_the_additions_that_it_is_given() -> None:
    from twinstep.fast.kernels._squares import ROOM_FP32, ROOM_HALF

    assert 2**24 * 2**24 * ROOM_HALF.value < 2**63
    assert (2**27 + 2**5) ** 2 * ROOM_FP32.value < 2**63
