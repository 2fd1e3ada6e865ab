"""Integer work: division, remainders, shifts, high halves, bit counting, random bits."""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from twinstep.replay.corpus.case import Draw, Run, case


@triton.jit
def divmod_kernel(x, y, quotient, rest, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, at < n, other=1)
    b = tl.load(y + at, at < n, other=1)
    tl.store(quotient + at, a // b, at < n)
    tl.store(rest + at, a % b, at < n)


def divided(x: torch.Tensor, y: torch.Tensor) -> Run:
    """C's division, towards zero."""
    pairs = list(zip(x.tolist(), y.tolist(), strict=True))
    whole = [abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) for a, b in pairs]
    rest = [a - q * b for (a, b), q in zip(pairs, whole, strict=True)]
    wants = {
        "quotient": torch.tensor(whole, dtype=x.dtype),
        "rest": torch.tensor(rest, dtype=x.dtype),
    }
    empty = {name: torch.empty_like(x) for name in wants}
    return Run({"x": x, "y": y, **empty, "n": x.numel()}, dict(wants))


@case(
    divmod_kernel,
    "x: *i32, y: *i32, quotient: *i32, rest: *i32, n: i32",
    constants={"BLOCK": 128},
    grid=(2,),
)
def division_of_int32(draw: Draw) -> Run:
    x, y = draw.integers(-(2**31), 2**31, 200), draw.integers(1, 1000, 200)
    return divided(x, y * (1 - 2 * (y & 1)))


@case(
    divmod_kernel,
    "x: *i64, y: *i64, quotient: *i64, rest: *i64, n: i32",
    constants={"BLOCK": 128},
    grid=(2,),
)
def division_of_int64(draw: Draw) -> Run:
    x = draw.integers(-(2**62), 2**62, 200, dtype=torch.int64)
    y = draw.integers(1, 2**40, 200, dtype=torch.int64)
    y[::3] = y[::3] % 1000 + 1
    return divided(x, y * (1 - 2 * (y & 1)))


@triton.jit
def mix_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h = tl.load(x + at, at < n).to(tl.uint64, bitcast=True)
    h = (h ^ (h >> 33)) * 0xFF51AFD7ED558CCD
    h = (h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53
    h = h ^ (h >> 33)
    h = (h << 13) | (h >> 51)
    tl.store(out + at, h.to(tl.int64, bitcast=True), at < n)


@case(mix_kernel, "x: *i64, out: *i64, n: i32", constants={"BLOCK": 128}, grid=(2,))
def mixed_bits_of_int64(draw: Draw) -> Run:
    x = draw.integers(-(2**63), 2**63 - 1, 200, dtype=torch.int64)
    return Run(
        {"x": x, "out": torch.empty_like(x), "n": 200},
        {"out": signed([mixed(v) for v in x.tolist()], 64)},
    )


def mixed(value: int) -> int:
    """The finaliser of a well-known hash, then a rotation, in unlimited integers."""
    mask = 2**64 - 1
    h = value & mask
    h = (h ^ h >> 33) * 0xFF51AFD7ED558CCD & mask
    h = (h ^ h >> 33) * 0xC4CEB9FE1A85EC53 & mask
    h ^= h >> 33
    return (h << 13 | h >> 51) & mask


def signed(values: list[int], width: int) -> torch.Tensor:
    """Unsigned numbers as the signed tensor of the same bits."""
    half = 1 << (width - 1)
    dtype = torch.int64 if width == 64 else torch.int32
    return torch.tensor([v - 2 * half if v >= half else v for v in values], dtype=dtype)


@triton.jit
def bits_kernel(x, y, count, zeros, high, reverse, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, at < n, other=0)
    b = tl.load(y + at, at < n, other=0)
    tl.store(count + at, libdevice.popc(a), at < n)
    tl.store(zeros + at, libdevice.clz(a), at < n)
    tl.store(reverse + at, libdevice.brev(a ^ b), at < n)
    product = tl.umulhi(a.to(tl.uint32, bitcast=True), b.to(tl.uint32, bitcast=True))
    tl.store(high + at, product.to(tl.int32, bitcast=True), at < n)


@case(
    bits_kernel,
    "x: *i32, y: *i32, count: *i32, zeros: *i32, high: *i32, reverse: *i32, n: i32",
    constants={"BLOCK": 128},
    grid=(2,),
)
def counted_bits(draw: Draw) -> Run:
    x, y = draw.integers(-(2**31), 2**31, 200), draw.integers(-(2**31), 2**31, 200)
    x[:3] = torch.tensor([0, -1, 1])
    pairs = [(a % 2**32, b % 2**32) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    wants = {
        "count": signed([a.bit_count() for a, _ in pairs], 32),
        "zeros": signed([32 - a.bit_length() for a, _ in pairs], 32),
        "high": signed([a * b >> 32 for a, b in pairs], 32),
        "reverse": signed([int(f"{a ^ b:032b}"[::-1], 2) for a, b in pairs], 32),
    }
    empty = {name: torch.empty_like(x) for name in wants}
    return Run({"x": x, "y": y, **empty, "n": 200}, dict(wants))


@triton.jit
def random_kernel(out, seed, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.randint(seed, at).to(tl.int32, bitcast=True), at < n)


@case(random_kernel, "out: *i32, seed: i32, n: i32", constants={"BLOCK": 128}, grid=(2,))
def counter_based_random_bits(draw: Draw) -> Run:
    want = signed([philox(index, 12345) for index in range(200)], 32)
    return Run({"out": torch.empty_like(want), "seed": 12345, "n": 200}, {"out": want})


def philox(counter: int, seed: int) -> int:
    """The first word of ten rounds of Philox 4x32, from its published definition."""
    c, key = [counter, 0, 0, 0], [seed, 0]
    for _ in range(10):
        low, high = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [high >> 32 ^ c[1] ^ key[0], high % 2**32, low >> 32 ^ c[3] ^ key[1], low % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return c[0]


@triton.jit
def narrow_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, at < n, other=0)
    b = tl.load(y + at, at < n, other=0)
    low = tl.minimum(a, b) * 3
    high = tl.maximum(a, b) >> 2
    tl.store(out + at, tl.where(a == b, low, low - high), at < n)


@case(narrow_kernel, "x: *i8, y: *i8, out: *i8, n: i32", constants={"BLOCK": 256}, grid=(2,))
def bytes_wrap_around(draw: Draw) -> Run:
    x = draw.integers(-128, 128, 400, dtype=torch.int8)
    y = draw.integers(-128, 128, 400, dtype=torch.int8)
    y[::7] = x[::7]
    a, b = x.long(), y.long()
    low, high = torch.minimum(a, b) * 3, torch.maximum(a, b) >> 2
    want = torch.where(a == b, low, low - high).to(torch.int8)
    return Run({"x": x, "y": y, "out": torch.empty_like(x), "n": 400}, {"out": want})
