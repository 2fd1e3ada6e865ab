"""Sums of squares of numbers within a window, as integers: what most tiles of exact norms take.

A window is given by its exponent E: numbers of magnitude below 2**E fit, down to where a number
is no multiple of the window's smallest unit. Every lane has its own sums, so that a loop over tiles
needs no barrier; what does not fit shows in two words that are looked at after the loop, and those
tiles are summed again by `fast.kernels._limbs.add_tile`.

16-bit numbers x of p significant bits, u = 2**(E - 24), T = 2**(p - 1) * u, v = 2**-24 * T:

    x**2 + T**2 = max(|x|, T)**2 + min(|x|, T)**2

The first is a multiple of u below 2**24 u, the second a multiple of v up to 2**24 v, or it does
not fit. A product with a power of two that makes u (or v) the smallest subnormal fp32 number has
the multiple as its bits: one multiplication is the conversion to an integer.

fp32 numbers are three digits of a fixed-point number, cut off by t = x + C, C a power of two (or
one and a half) whose last place is the digit's unit: the digit is the difference of the bits of t
and C. Units are 2**(E - 23), 2**(E - 46) and 2**(E - 51); the last two digits make one integer.
"""

import triton
import triton.language as tl

from twinstep.fast.kernels._limbs import DIGIT, add_window

WIDTH = tl.constexpr(1024)  # numbers that are added at once: 4 for each of 256 threads
SUMS = tl.constexpr(512)  # sums side by side: two for each of those threads
FULL = tl.constexpr(24)  # significant bits of fp32
ROOM_HALF = tl.constexpr(16384)  # squares up to 2**48 that one lane adds
ROOM_FP32 = tl.constexpr(256)  # squares up to (2**27 + 2**5)**2


@triton.jit
def room(BITS: tl.constexpr):
    """Return how many additions each lane's sums hold, for numbers of BITS significant bits."""
    count: tl.constexpr = ROOM_FP32 if BITS == FULL else ROOM_HALF
    return count


@triton.jit
def float_of(bits):
    """Return the fp32 number of these bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def bits_of(x):
    """Return the bits of an fp32 number."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def two_to(exponent):
    """Return 2**exponent as fp32, from -149 to 127."""
    normal = (exponent + 127) << 23
    return float_of(tl.where(exponent < -126, 1 << tl.maximum(exponent + 149, 0), normal))


@triton.jit
def window_above(largest, BITS: tl.constexpr):
    """Return the exponent of the window for numbers up to `largest`, given as bits of fp32."""
    exponent = (largest >> 23) - 126
    if BITS == 11:
        # From 2**14 down to the smallest of all fp16 numbers everything fits.
        exponent = tl.minimum(tl.maximum(exponent, 14), 16)
    elif BITS == 8:
        exponent = tl.minimum(tl.maximum(exponent + 3, -96), 19)
    else:
        exponent = tl.minimum(tl.maximum(exponent + 2, -96), 120)
    return exponent


@triton.jit
def constants_of(exponent, BITS: tl.constexpr):
    """Return the four numbers that a window's arithmetic takes."""
    if BITS == FULL:
        second = 1.5 * two_to(exponent - 23)
        third = 1.5 * two_to(exponent - 28)
        constants = (two_to(exponent), second, third, bits_of(second) * 32 + bits_of(third))
    else:
        threshold = two_to(exponent - 25 + BITS)
        back = two_to(exponent + 100 + BITS)
        constants = (threshold, two_to(-125 - exponent), two_to(-100 - BITS - exponent), back)
    return constants


@triton.jit
def multiply_add(a, b, c):
    """Return a * b + c: int32, int32 and int64."""
    if tl.target_info.is_cuda():
        # As one instruction. What Triton makes of the formula is taken apart into three by ptxas.
        return tl.inline_asm_elementwise(
            "{ .reg .b32 l, h; mov.b64 {l, h}, $3; mad.lo.cc.s32 l, $1, $2, l; "
            "madc.hi.s32 h, $1, $2, h; mov.b64 $0, {l, h}; }",
            "=l,r,r,l",
            [a, b, c],
            dtype=tl.int64,
            is_pure=True,
            pack=1,
        )
    return a.to(tl.int64) * b.to(tl.int64) + c


@triton.jit
def add_squares(s0, s1, s2, above, below, x, c, BITS: tl.constexpr):
    """Add the squares of a multiple of SUMS fp32 numbers that have BITS significant bits.

    Returns the three sums, and `above` and `below`, which collect bits of what does not fit.
    """
    x = tl.abs(x)
    if x.numel == SUMS:
        s0, s1, s2, above, below = _add_lanes(s0, s1, s2, above, below, x, c, BITS)
    else:
        one, two = tl.split(tl.reshape(x, [SUMS, 2]))
        s0, s1, s2, above, below = _add_lanes(s0, s1, s2, above, below, one, c, BITS)
        s0, s1, s2, above, below = _add_lanes(s0, s1, s2, above, below, two, c, BITS)
    return s0, s1, s2, above, below


@triton.jit
def _add_lanes(s0, s1, s2, above, below, x, c, BITS: tl.constexpr):
    """Add the squares of SUMS numbers that are not negative."""
    if BITS == FULL:
        first, second, third, both = c
        t = x + first
        a = bits_of(t) - bits_of(first)
        x = x - (t - first)
        t = x + second
        x = x - (t - second)
        last = x + third
        b = bits_of(t) * 32 + bits_of(last) - both
        below |= bits_of(last - third) ^ bits_of(x)
        s1 = multiply_add(a, b, s1)
        s2 = multiply_add(b, b, s2)
    else:
        threshold, to_upper, to_lower, back = c
        upper = tl.maximum(x, threshold, propagate_nan=tl.PropagateNan.ALL)
        lower = tl.minimum(x, threshold)
        a = bits_of(upper * to_upper)
        least = lower * to_lower
        below |= bits_of(least * back) ^ bits_of(lower)
        b = bits_of(least)
        s1 = multiply_add(b, b, s1)
    above |= a
    return multiply_add(a, a, s0), s1, s2, above, below


@triton.jit
def misfits(above, below, BITS: tl.constexpr):
    """Say whether any number of any lane did not fit."""
    outside = above >> (23 if BITS == FULL else 24)
    return tl.max(((outside | below) != 0).to(tl.int32), axis=0) != 0


@triton.jit
def _add_four(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def into_limbs(limbs, sums, additions, exponent, BITS: tl.constexpr):
    """Add all lanes' sums, of `additions` numbers each, to a vector of limbs."""
    s0, s1, s2 = sums
    if BITS == FULL:
        at0 = 2 * exponent - 46
        at1 = 2 * exponent - 73
        at2 = 2 * exponent - 102
        limbs = add_window(limbs, tl.sum(s2 & DIGIT), at2)
        limbs = add_window(limbs, tl.sum(s2 >> 32), at2 + 32)
    else:
        s1 -= additions.to(tl.int64) << 48
        at0 = 2 * exponent - 48
        at1 = 2 * exponent - 98 + 2 * BITS
    halves = (s0 & DIGIT, s0 >> 32, s1 & DIGIT, s1 >> 32)
    low0, high0, low1, high1 = tl.reduce(halves, 0, _add_four)
    limbs = add_window(limbs, low0, at0)
    limbs = add_window(limbs, high0, at0 + 32)
    limbs = add_window(limbs, low1, at1)
    return add_window(limbs, high1, at1 + 32)


@triton.jit
def no_squares():
    """Return three empty sums of every lane."""
    zero = tl.zeros([SUMS], tl.int64)
    return zero, zero, zero
