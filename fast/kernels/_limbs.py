"""Exact sums of squares, or of magnitudes, as integers.

A sum is int64[PADDED]: limb j < LIMBS weighs 2**(32 * (j - ORIGIN)), so squares of every fp32
number (2**-298 to 2**256) and the carries of 2**40 of them fit. Limbs are signed and need not be
normalised: integers add in any order, so neither grid nor tensor order nor rank can matter.
Limb NONFINITE counts tiles: 1 for a tile that holds an infinity, 2**32 for one that holds a NaN.
The largest magnitude has a slot of its own, LARGEST, as bits, which order like magnitudes.

A tile's squares are exact in float64. They are cut into windows of 40 bits, from the top down, by
`head = (x + C) - C` with C = 1.5 * 2**(52 + 40 k), which rounds x to a multiple of 2**(40 k). At
most 4096 heads below 2**40 units add up below 2**52 units, exactly; what is left goes to the next
window. A tile adds less than 2**33.1 to a limb, so 2**29 tiles, of all ranks together, fit.
"""

import triton
import triton.language as tl

LIMBS = tl.constexpr(24)
ORIGIN = tl.constexpr(11)
NONFINITE = tl.constexpr(24)
LARGEST = tl.constexpr(25)
TOLD = tl.constexpr(26)  # and three slots more: see `fast.optimizers.agreement`
PADDED = tl.constexpr(32)
DIGIT = tl.constexpr(0xFFFFFFFF)
INFINITY = tl.constexpr(0x7F800000)  # the bits of fp32 +inf
PAST_SQUARES = tl.constexpr(0x5F800000)  # those of 2**64, whose square is no fp32 number
# In the control `exhausted`, whose lowest bit is an overflow at the floor:
DIFFERS = tl.constexpr(2)  # ranks have different scales
REFUSED = tl.constexpr(4)  # times what is in TOLD


@triton.jit
def power_of_two(exponent):
    """Return 2**exponent as float64, exponent in the normal range."""
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def window_of(largest, SQUARED: tl.constexpr):
    """Return the k whose window 2**(40 k) .. 2**(40 (k + 1)) holds `largest` or its square.

    `largest` is given as the bits of a positive fp32 number.
    """
    x = largest.to(tl.float32, bitcast=True).to(tl.float64)
    if SQUARED:
        x = x * x
    exponent = (x.to(tl.int64, bitcast=True) >> 52) - 1023
    # Biased to be positive: the division of integers truncates towards zero.
    return (exponent + 1200) // 40 - 30


@triton.jit
def add_window(limbs, total, exponent):
    """Add total * 2**exponent, |total| <= 2**52, to a vector of limbs."""
    bit = exponent + 32 * ORIGIN
    limb = bit >> 5
    low = (total & DIGIT) << (bit & 31)
    high = (total >> 32) << (bit & 31)
    lane = tl.arange(0, PADDED)
    limbs += tl.where(lane == limb, low & DIGIT, 0)
    limbs += tl.where(lane == limb + 1, (low >> 32) + (high & DIGIT), 0)
    limbs += tl.where(lane == limb + 2, high >> 32, 0)
    return limbs


@triton.jit
def add_tile(limbs, x, SQUARED: tl.constexpr):
    """Add squares or magnitudes of a tile of at most 4096 elements, or count it as non-finite."""
    # The bits of |x| order like |x|, and infinity and NaN come last.
    bits = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(bits)
    if largest >= INFINITY:
        infinite = tl.max((bits == INFINITY).to(tl.int64))
        nan = (largest > INFINITY).to(tl.int64) << 32
        limbs += tl.where(tl.arange(0, PADDED) == NONFINITE, infinite + nan, 0)
    else:
        wide = x.to(tl.float64)
        rest = wide * wide if SQUARED else tl.abs(wide)
        k = window_of(largest, SQUARED)
        left = largest
        while left != 0:
            c = 1.5 * power_of_two(52 + 40 * k)
            head = (rest + c) - c
            rest = rest - head
            total = (tl.sum(head) * power_of_two(-40 * k)).to(tl.int64)
            limbs = add_window(limbs, total, 40 * k)
            left = tl.max((rest != 0.0).to(tl.int32))
            k -= 1
    return limbs


@triton.jit
def leading_digits(limbs):
    """Normalise the limbs and return (d0, d1, d2, below, top).

    d0 is the highest digit that is not 0 (base 2**32, weight of limb `top`), d1 and d2 the two
    below it, and `below` is not 0 where anything lies below those.
    """
    carry = tl.load(limbs) * 0
    d0 = carry
    d1 = carry
    d2 = carry
    below = carry
    top = carry
    previous = carry
    second = carry
    rest = carry
    for limb in tl.static_range(LIMBS):
        value = tl.load(limbs + limb) + carry
        digit = value & DIGIT
        carry = value >> 32
        found = digit != 0
        d0 = tl.where(found, digit, d0)
        d1 = tl.where(found, previous, d1)
        d2 = tl.where(found, second, d2)
        below = tl.where(found, rest, below)
        top = tl.where(found, limb, top)
        rest = rest | second
        second = previous
        previous = digit
    return d0, d1, d2, below, top


@triton.jit
def round_limbs(limbs):
    """Return the sum of what is finite, rounded once to the nearest even float64."""
    d0, d1, d2, below, top = leading_digits(limbs)
    exponent = (d0.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1023
    # Shifted so that the leading 1 is bit 63: the conversion below then drops 11 bits, and the
    # lowest of them stands for everything further down.
    shift = 31 - exponent
    high = (((d0 << 32) | d1) << shift) | (d2 >> (32 - shift))
    rest = ((d2 << shift) & DIGIT) | below
    high = high | (rest != 0).to(tl.int64)
    rounded = high.to(tl.uint64, bitcast=True).to(tl.float64)
    total = rounded * power_of_two(32 * (top - 1 - ORIGIN) - shift)
    return tl.where(d0 != 0, total, 0.0)


@triton.jit
def norm_of(limbs):
    """Return (norm, found_inf) as fp32: any NaN gives NaN, otherwise any infinity gives inf."""
    nonfinite = tl.load(limbs + NONFINITE)
    norm = tl.sqrt(round_limbs(limbs)).to(tl.float32)
    norm = tl.where(nonfinite != 0, float("inf"), norm)
    norm = tl.where((nonfinite >> 32) != 0, float("nan"), norm)
    return norm, (nonfinite != 0).to(tl.float32)


@triton.jit
def sum_of(limbs):
    """Return the sum of magnitudes as fp32: any NaN gives NaN, otherwise any infinity gives inf."""
    nonfinite = tl.load(limbs + NONFINITE)
    total = round_limbs(limbs).to(tl.float32)
    total = tl.where(nonfinite != 0, float("inf"), total)
    return tl.where((nonfinite >> 32) != 0, float("nan"), total)


@triton.jit
def largest_of(limbs):
    """Return the largest magnitude as fp32; NaN beats infinity."""
    return tl.load(limbs + LARGEST).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def told_by_ranks(limbs, NORM_MAX: tl.constexpr):
    """Return what `exhausted` is to hold of refusals and scales of all ranks; 0 of none."""
    told = tl.load(limbs + TOLD)
    digest = tl.load(limbs + TOLD + 2)
    square = tl.load(limbs + TOLD + 3)
    if NORM_MAX:
        differs = digest + square != 0
    else:
        differs = tl.load(limbs + TOLD + 1) * square != digest * digest
    return told * REFUSED + differs.to(tl.int64) * DIFFERS
