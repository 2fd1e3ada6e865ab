"""Every pure instruction against the independent statement of its meaning, bit for bit.

Inputs of 16 bits are exhaustive (65,536 patterns) where there is one source; otherwise the
patterns at the edges of the format in all combinations, and random bits.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from parity.replay import meaning
from parity.replay.dtypes import width
from parity.replay.meaning import FORMATS
from parity.replay.meaning_integer import meaning_of
from parity.replay.probe import run_probe

Bits = npt.NDArray[np.unsignedinteger[Any]]


def edges(kind: str) -> list[int]:
    """Bit patterns where formats and algorithms change their mind."""
    if kind not in FORMATS:
        bits = 8 * width(kind)
        near = [0, 1, 2, 3, 7, 8, 31, 32, 33, 63, 64, 255]
        near += [(1 << (bits - 1)) + d for d in (-2, -1, 0, 1)]
        return sorted({x % (1 << bits) for x in near + [-x - 1 for x in near]})
    exponent, fraction = FORMATS[kind]
    infinity = ((1 << exponent) - 1) << fraction
    one = ((1 << (exponent - 1)) - 1) << fraction
    smallest = 1 << fraction
    ulp_of_one = one - (fraction << fraction)
    plain = [0, 1, 2, smallest - 1, smallest, smallest + 1, infinity - 1, infinity, infinity + 1]
    plain += [one, one + 1, one - 1, one + smallest, one | 1 << (fraction - 1), ulp_of_one]
    plain += [max(ulp_of_one - smallest, 1), ulp_of_one + 1, infinity | 1 << (fraction - 1)]
    sign = 1 << (exponent + fraction)
    return sorted({x | s for x in plain for s in (0, sign)})


def samples(kinds: Sequence[str], seed: str, count: int = 400) -> list[Bits]:
    """All edge combinations (thinned to a bound) and random bits, one array per source."""
    rng = np.random.default_rng(zlib.crc32(seed.encode()))
    if len(kinds) == 1 and kinds[0] in ("f16", "bf16"):
        return [np.arange(1 << 16, dtype=np.uint16)]
    combos = list(itertools.product(*(edges(kind) for kind in kinds)))
    if len(combos) > count:
        combos = [combos[i] for i in rng.choice(len(combos), count, replace=False)]
    columns = []
    for index, kind in enumerate(kinds):
        dtype = np.dtype(f"u{width(kind)}")
        random = rng.integers(0, np.iinfo(dtype).max, count, dtype=dtype, endpoint=True)
        if kind in FORMATS:  # half of them with near exponents, so that sums interact
            random[: count // 2] = random[: count // 2] % (1 << (FORMATS[kind][1] + 3)) + (
                ((1 << (FORMATS[kind][0] - 1)) - 4) << FORMATS[kind][1]
            )
        columns.append(np.concatenate([np.array([c[index] for c in combos], dtype), random]))
    return columns


def check(
    opcode: str, kinds: Sequence[str], result: str, want: Callable[..., int], tail: str = ""
) -> None:
    """Replay's bits equal the statement's; a float NaN may have any payload in f64."""
    inputs = samples(kinds, opcode)
    got = run_probe(opcode, kinds, result, inputs, tail)
    rows = zip(*(x.tolist() for x in inputs), strict=True)
    for row, found in zip(rows, got.tolist(), strict=True):
        wanted = want(*row)
        assert found == wanted, (
            f"{opcode}({', '.join(map(hex, row))}) = {found:#x}, but should be {wanted:#x}"
        )


MODES = ("rn", "rz", "rm", "rp")
BINARY = [
    f"{op}.{mode}.{kind}"
    for op in ("add", "sub", "mul", "div")
    for mode in MODES
    for kind in ("f32", "f64")
]
BINARY += [f"{op}.{kind}" for op in ("add", "sub", "mul") for kind in ("f16", "bf16")]
BINARY += [
    f"{op}{nan}.{kind}"
    for op in ("min", "max")
    for nan in ("", ".NaN")
    for kind in ("f16", "bf16", "f32")
] + ["min.f64", "max.f64"]
BINARY += [
    "add.ftz.f32",
    "mul.ftz.f32",
    "mul.rn.ftz.f32",
    "add.sat.f32",
    "mul.sat.f16",
    "add.ftz.f16",
    "mul.ftz.f16",
    "div.rn.ftz.f32",
    "min.ftz.f32",
]
UNARY = [
    f"{op}.{mode}.{kind}" for op in ("sqrt", "rcp") for mode in MODES for kind in ("f32", "f64")
]
UNARY += [f"{op}.{kind}" for op in ("abs", "neg") for kind in ("f16", "bf16")]
FUSED = [f"fma.{mode}.{kind}" for mode in MODES for kind in ("f32", "f64")]
FUSED += [
    "fma.rn.f16",
    "fma.rn.bf16",
    "fma.rn.relu.f16",
    "fma.rn.relu.bf16",
    "fma.rn.ftz.f32",
    "fma.rn.sat.f32",
    "fma.rn.ftz.f16",
]


@pytest.mark.parametrize("opcode", [*UNARY, *BINARY, *FUSED])
def test_float_arithmetic_is_rounded_once(opcode: str) -> None:
    kind = opcode.rsplit(".", 1)[1]
    count = 3 if opcode.startswith("fma") else 2 if opcode in BINARY else 1
    check(opcode, [kind] * count, kind, lambda *bits: meaning.arithmetic(opcode, bits))


CONVERSIONS = [f"cvt.{mode}.{pair}" for mode in MODES for pair in ("f32.f64", "f16.f32", "f16.f64")]
CONVERSIONS += [
    "cvt.rn.bf16.f32",
    "cvt.rz.bf16.f32",
    "cvt.rn.relu.bf16.f32",
    "cvt.rn.relu.f16.f32",
    "cvt.rn.bf16.f64",
    "cvt.rn.bf16.f16",
]
CONVERSIONS += [
    "cvt.f32.f16",
    "cvt.f64.f16",
    "cvt.f32.bf16",
    "cvt.f64.f32",
    "cvt.ftz.f64.f32",
    "cvt.rn.ftz.f32.f64",
    "cvt.sat.f32.f32",
    "cvt.rn.satfinite.f16.f32",
]
CONVERSIONS += [
    f"cvt.{m}.{kind}.{kind}" for m in ("rni", "rzi", "rmi", "rpi") for kind in ("f16", "f32", "f64")
]
CONVERSIONS += [
    f"cvt.{m}.{to}.{of}"
    for m in ("rni", "rzi", "rmi", "rpi")
    for to in ("s32", "u32", "s64", "u64", "s16", "u16")
    for of in ("f16", "f32", "f64", "bf16")
]
CONVERSIONS += [
    f"cvt.{mode}.{to}.{of}"
    for mode in MODES
    for to in ("f32", "f64")
    for of in ("s32", "u32", "s64", "u64", "s16", "u16")
]
CONVERSIONS += [
    f"cvt.rn.{to}.{of}" for to in ("f16", "bf16") for of in ("s32", "u64", "s64", "s16")
]
WORDS = ("s16", "u16", "s32", "u32", "s64", "u64")
CONVERSIONS += [
    f"cvt{sat}.{to}.{of}" for sat in ("", ".sat") for to, of in itertools.product(WORDS, repeat=2)
]


@pytest.mark.parametrize("opcode", CONVERSIONS)
def test_conversions_round_and_saturate_as_stated(opcode: str) -> None:
    target, source = opcode.split(".")[-2:]
    check(opcode, [source], target, lambda bits: meaning.convert(opcode, bits))


def test_a_packed_conversion_puts_its_first_source_on_top() -> None:
    for kind in ("f16", "bf16"):
        single = f"cvt.rn.{kind}.f32"
        check(
            f"cvt.rn.{kind}x2.f32",
            ["f32", "f32"],
            "b32",
            lambda a, b, one=single: meaning.convert(one, a) << 16 | meaning.convert(one, b),
        )


@pytest.mark.parametrize(
    "opcode",
    [
        f"{op}.{kind}x2"
        for op in ("add", "sub", "mul", "min", "max", "fma.rn")
        for kind in ("f16", "bf16")
    ]
    + ["add.rn.f32x2", "mul.rn.f32x2", "fma.rn.f32x2"],
)
def test_packed_arithmetic_is_two_scalars(opcode: str) -> None:
    scalar = opcode.removesuffix("x2")
    kind = scalar.rsplit(".", 1)[1]
    bits = 8 * width(kind)
    whole = f"b{2 * bits}"

    def want(*words: int) -> int:
        low = meaning.arithmetic(scalar, tuple(w & ((1 << bits) - 1) for w in words))
        return meaning.arithmetic(scalar, tuple(w >> bits for w in words)) << bits | low

    check(opcode, [whole] * (3 if "fma" in opcode else 2), whole, want)


COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge", "num", "nan"]
COMPARISONS += ["equ", "neu", "ltu", "leu", "gtu", "geu"]


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("name", COMPARISONS)
def test_float_comparisons_know_what_unordered_means(name: str, kind: str) -> None:
    def want(a: int, b: int) -> int:
        return int(meaning.compare(name, meaning.decode(a, kind), meaning.decode(b, kind)))

    check(f"setp.{name}.{kind}", [kind, kind], "pred", want)


INTEGER2 = [
    f"{op}.{kind}"
    for op in ("add", "sub", "min", "max", "mul.lo", "mul.hi", "div", "rem")
    for kind in ("s16", "u16", "s32", "u32", "s64", "u64")
]
INTEGER2 += ["add.sat.s32", "sub.sat.s32"]
INTEGER2 += [
    f"setp.{c}.{kind}"
    for c in ("eq", "ne", "lt", "le", "gt", "ge")
    for kind in ("s16", "u16", "s32", "u32", "s64", "u64")
]
INTEGER2 += [f"{op}.{kind}" for op in ("and", "or", "xor") for kind in ("b16", "b32", "b64")]
WIDE = [f"{op}.wide.{kind}" for op in ("mul", "mad") for kind in ("s16", "u16", "s32", "u32")]
INTEGER1 = [f"{op}.{kind}" for op in ("abs", "neg") for kind in ("s16", "s32", "s64")]
INTEGER1 += [f"{op}.{kind}" for op in ("not", "cnot") for kind in ("b16", "b32", "b64")]
INTEGER1 += [f"brev.{kind}" for kind in ("b32", "b64")]
COUNTS = [f"{op}.{kind}" for op in ("popc", "clz") for kind in ("b32", "b64")]
COUNTS += [f"bfind{s}.{k}" for s in ("", ".shiftamt") for k in ("s32", "u32", "s64", "u64")]
INTEGER3 = [f"{op}.{kind}" for op in ("mad.lo", "mad.hi", "sad") for kind in ("s32", "u32", "s64")]


@pytest.mark.parametrize("opcode", [*INTEGER1, *INTEGER2, *INTEGER3, *WIDE, *COUNTS])
def test_integer_instructions_follow_unbounded_integers(opcode: str) -> None:
    kind = opcode.rsplit(".", 1)[1]
    count = 1 if opcode in INTEGER1 + COUNTS else 3 if opcode in INTEGER3 else 2
    kinds = [kind] * count
    result = "pred" if opcode.startswith("setp") else "u32" if opcode in COUNTS else kind
    if "wide" in opcode:
        result = f"{kind[0]}{16 * width(kind)}"
        kinds = [kind, kind] + ([result] if opcode.startswith("mad") else [])
    check(opcode, kinds, result, meaning_of(opcode))


@pytest.mark.parametrize(
    "opcode",
    [f"shl.b{n}" for n in (16, 32, 64)] + [f"shr.{k}{n}" for k in "su" for n in (16, 32, 64)],
)
def test_shifts_clamp_their_amount(opcode: str) -> None:
    kind = opcode.rsplit(".", 1)[1]
    check(opcode, [kind, "u32"], kind, meaning_of(opcode))


@pytest.mark.parametrize(
    ("opcode", "kinds"),
    [(f"bfe.{k}", [k, "u32", "u32"]) for k in ("s32", "u32", "s64", "u64")]
    + [(f"bfi.{k}", [k, k, "u32", "u32"]) for k in ("b32", "b64")]
    + [(f"shf.{d}.{m}.b32", ["u32"] * 3) for d in "lr" for m in ("clamp", "wrap")]
    + [("prmt.b32", ["u32"] * 3), ("dp4a.s32.s32", ["u32"] * 3), ("dp4a.u32.u32", ["u32"] * 3)],
)
def test_bit_fields_follow_the_pseudo_code(opcode: str, kinds: list[str]) -> None:
    check(opcode, kinds, kinds[0], meaning_of(opcode))


@pytest.mark.parametrize("table", [0x00, 0x96, 0xE8, 0xCA, 0x1B, 0xFF])
def test_lop3_reads_its_table_bit_by_bit(table: int) -> None:
    def want(a: int, b: int, c: int) -> int:
        return sum(
            (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i
            for i in range(32)
        )

    check("lop3.b32", ["u32"] * 3, "u32", want, f", {table}")


def test_the_check_can_say_no() -> None:
    with pytest.raises(AssertionError, match=r"add\.s32\(.*but should be"):
        check("add.s32", ["s32", "s32"], "s32", lambda a, b: (a + b + 1) & 0xFFFFFFFF)
