"""The constructs in which Triton's interpreter was suspected of leaving compiled code.

A construct has a kernel, operands and a statement of the bits that should come out: what the
compiled instruction means (`replay.spec.floats`), approximate ones correctly rounded.
Behaviour that has no such statement (races, accesses out of bounds) is told as what each engine
did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from twinstep.parity.proof.interpret.facts import Facts
from twinstep.replay.conformance.operands import sampled
from twinstep.replay.conformance.statements import approximate
from twinstep.replay.dtypes import Array
from twinstep.replay.spec import floats

COUNT = 1024
FINITE = 0x7F7FFFFF

Stated = Callable[[list[int], list[int], list[int]], Sequence[int | None]]


@dataclass(frozen=True)
class Construct:
    """One row of the table.

    Attributes:
        name: The construct, as in docs/reference/engines.md.
        kernel: In `parity.proof.interpret.kernels`.
        source, result: PTX types of inputs and output.
        stated: From the bits of a, b, c to the bits that should be left (None: left open).
        touched: Whether a kernel with these facts meets it.
        fused: Whether multiplications and additions may contract.
        scalar: The argument `n`.
        blocks: Programs.
        note: What the difference is, in a sentence.
        known: Whether the interpreter is known to leave compiled code here.
    """

    name: str
    kernel: str
    source: str
    result: str
    stated: Stated | None
    touched: Callable[[Facts], bool]
    note: str
    fused: bool = True
    scalar: int | float = COUNT
    blocks: int = 1
    known: bool = True

    def inputs(self) -> list[Array]:
        """Bits of a, b and c: edges of the type and random ones."""
        return [np.resize(x, COUNT) for x in sampled((self.source,) * 3, self.name, COUNT)]


def each(function: Callable[..., int], sources: int) -> Stated:
    """A statement element by element."""
    return lambda a, b, c: [function(*row) for row in zip(*(a, b, c)[:sources], strict=True)]


def arithmetic(opcode: str, sources: int) -> Stated:
    """The meaning of one instruction."""
    return each(lambda *bits: floats.arithmetic(opcode, bits), sources)


def two_roundings(a: int, b: int, c: int) -> int:
    """a·b + c with a rounding after each."""
    return floats.arithmetic("add.f32", (floats.arithmetic("mul.f32", (a, b)), c))


def from_fp32(a: int) -> int:
    """(1 - 0.999) a where 0.999 is a fp32 argument."""
    beta, one = 0x3F7FBE77, 0x3F800000
    return floats.arithmetic("mul.f32", (floats.arithmetic("sub.f32", (one, beta)), a))


def greatest_of_all(a: list[int], b: list[int], c: list[int]) -> Sequence[int | None]:
    """The maximum of a row, plus zero, in which NaN loses."""
    found = a[0]
    for value in a[1:]:
        found = floats.arithmetic("max.f32", (found, value))
    return [floats.arithmetic("add.f32", (found, 0))] * COUNT


def approximated(opcode: str) -> Stated:
    """An approximate instruction, correctly rounded."""
    return each(lambda a: approximate(opcode, a), 1)


def with_call(*names: str) -> Callable[[Facts], bool]:
    """Kernels that call one of these."""
    return lambda facts: bool(facts.calls & set(names))


def with_dtype(kind: str, arithmetic_too: bool = False) -> Callable[[Facts], bool]:
    """Kernels that store a type, or compute in it."""
    return lambda facts: kind in facts.dtypes and (facts.computes or not arithmetic_too)


CONSTRUCTS: tuple[Construct, ...] = (
    Construct(
        "fp32 stored as bf16",
        "cast",
        "f32",
        "bf16",
        each(lambda a: floats.convert("cvt.rn.bf16.f32", a), 1),
        with_dtype("bf16"),
        "the interpreter cuts the lower bits off instead of rounding to nearest even",
    ),
    Construct(
        "fp32 stored as fp16",
        "cast",
        "f32",
        "f16",
        each(lambda a: floats.convert("cvt.rn.f16.f32", a), 1),
        with_dtype("fp16"),
        "subnormals, ties and overflow",
        known=False,
    ),
    Construct(
        "bf16 + bf16",
        "add",
        "bf16",
        "bf16",
        arithmetic("add.rn.bf16", 2),
        with_dtype("bf16", True),
        "the interpreter adds in fp32 and cuts, or adds bit patterns, by its version",
    ),
    Construct(
        "fp16 + fp16",
        "add",
        "f16",
        "f16",
        arithmetic("add.rn.f16", 2),
        with_dtype("fp16", True),
        "one rounding",
        known=False,
    ),
    Construct(
        "a * b + c, fusion allowed",
        "multiply_add",
        "f32",
        "f32",
        arithmetic("fma.rn.f32", 3),
        lambda facts: facts.contracts,
        "the compiler contracts to one rounding, the interpreter rounds twice",
    ),
    Construct(
        "a * b + c, enable_fp_fusion=False",
        "multiply_add",
        "f32",
        "f32",
        each(two_roundings, 3),
        lambda facts: facts.contracts,
        "two roundings everywhere",
        fused=False,
        known=False,
    ),
    Construct(
        "tl.fma",
        "fma",
        "f32",
        "f32",
        arithmetic("fma.rn.f32", 3),
        with_call("fma"),
        "one rounding is meant",
    ),
    Construct(
        "a / b",
        "divide",
        "f32",
        "f32",
        arithmetic("div.rn.f32", 2),
        lambda facts: facts.divides,
        "compiled to div.full: replay rounds correctly and charges 2 ulp",
        known=False,
    ),
    Construct(
        "tl.div_rn",
        "divide_rn",
        "f32",
        "f32",
        arithmetic("div.rn.f32", 2),
        with_call("div_rn"),
        "IEEE division",
        known=False,
    ),
    Construct(
        "tl.sqrt",
        "root",
        "f32",
        "f32",
        arithmetic("sqrt.rn.ftz.f32", 1),
        with_call("sqrt"),
        "compiled to sqrt.approx.ftz: subnormal operands become zero",
    ),
    Construct(
        "tl.sqrt_rn",
        "root_rn",
        "f32",
        "f32",
        arithmetic("sqrt.rn.f32", 1),
        with_call("sqrt_rn"),
        "IEEE square root",
        known=False,
    ),
    Construct(
        "tl.rsqrt",
        "inverse_root",
        "f32",
        "f32",
        approximated("rsqrt.approx.ftz.f32"),
        with_call("rsqrt"),
        "compiled to rsqrt.approx.ftz: subnormals become zero; the interpreter rounds twice",
    ),
    Construct(
        "tl.exp2",
        "power_of_two",
        "f32",
        "f32",
        approximated("ex2.approx.f32"),
        with_call("exp", "exp2"),
        "compiled to ex2.approx; the interpreter calls NumPy's function, which is off by more",
    ),
    Construct(
        "fp32 to int32 out of range",
        "cast",
        "f32",
        "s32",
        each(lambda a: floats.convert("cvt.rzi.s32.f32", a), 1),
        lambda facts: facts.casts_to_int,
        "hardware saturates and turns NaN into 0",
    ),
    Construct(
        "int32 overflow",
        "multiply_add",
        "s32",
        "s32",
        each(lambda a, b, c: (a * b + c) & 0xFFFFFFFF, 3),
        lambda facts: facts.contracts,
        "wraps",
        known=False,
    ),
    Construct(
        "tl.maximum with NaN",
        "greatest",
        "f32",
        "f32",
        arithmetic("max.f32", 2),
        with_call("maximum", "minimum"),
        "a NaN should give way to the other operand",
    ),
    Construct(
        "tl.max with NaN",
        "greatest_of_all",
        "f32",
        "f32",
        greatest_of_all,
        with_call("max", "min"),
        "a NaN should give way to numbers",
        known=False,
    ),
    Construct(
        "scalar argument: (1.0 - beta) * a",
        "scalar_minus",
        "f32",
        "f32",
        each(from_fp32, 1),
        lambda facts: facts.scalar_arithmetic,
        "compiled code gets beta as fp32, the interpreter computes with a Python double",
        scalar=0.999,
    ),
    Construct(
        "masked load without other",
        "masked",
        "f32",
        "f32",
        lambda a, b, c: [x if i < 1000 else 0 for i, x in enumerate(a)],
        lambda facts: facts.masked_without_other,
        "what is not loaded is undefined; a kernel must not depend on the zeros it may see",
        scalar=1000,
        known=False,
    ),
    Construct(
        "tl.atomic_add of bf16",
        "atomic_sum",
        "bf16",
        "bf16",
        None,
        lambda facts: "atomic_add" in facts.calls and "bf16" in facts.dtypes,
        "not supported by the interpreter",
    ),
    Construct(
        "tl.inline_asm_elementwise",
        "inline",
        "f32",
        "f32",
        each(lambda a: floats.arithmetic("add.rn.f32", (a, 0x3F800000)), 1),
        with_call("inline_asm_elementwise"),
        "not supported by the interpreter",
    ),
    Construct(
        "store beyond the tensor",
        "beyond",
        "f32",
        "f32",
        None,
        lambda facts: True,
        "the interpreter writes to whatever memory is there",
    ),
    Construct(
        "race between programs",
        "neighbour",
        "f32",
        "f32",
        None,
        lambda facts: True,
        "the interpreter runs programs one after the other",
        blocks=4,
    ),
)
