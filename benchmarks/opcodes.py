"""Part: pure instructions compute the same bits on the GPU as in replay.

The list holds every arithmetic, logic and conversion instruction that compiled kernels of ours use
(a test compares it with what replay executes). Approximate instructions are left out: the GPU's
error is the vendor's business, and replay charges it to the bound.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from twinstep.benchmarks.part import Broken, Figures, Skipped
from twinstep.benchmarks.ptx import MOST_SOURCES, REGISTERS, Instruction, module
from twinstep.replay import run_ptx
from twinstep.replay.cuda.driver import Argument, Loaded, NoDriver, RefusedByDriver

# The width is known to the instruction, not to the type.
Bits = npt.NDArray[np.unsignedinteger[Any]]
COUNT = 1 << 16
THREADS = 256
VERSION = "8.0"
UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}
# exponent bits, mantissa bits
FLOATS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}


# Types that T stands for; types of the sources; type of the result; opcodes.
FORMS = (
    ("f32 f64", "T T", "T", "add.rn.T sub.rn.T mul.rn.T div.rn.T min.T max.T"),
    ("f32", "T T", "T", "min.NaN.T max.NaN.T"),
    ("f32 f64", "T", "T", "sqrt.rn.T rcp.rn.T abs.T neg.T"),
    ("f32 f64", "T T T", "T", "fma.rn.T"),
    ("f32 f64", "T T", "pred", "setp.eq.T setp.ne.T setp.lt.T setp.le.T setp.gt.T setp.ge.T"),
    ("f32 f64", "T T", "pred", "setp.neu.T setp.equ.T setp.ltu.T setp.gtu.T setp.geu.T"),
    ("f32 f64", "T T", "pred", "setp.num.T setp.nan.T"),
    ("s32 s64 u32 u64", "T T", "T", "add.T sub.T mul.lo.T min.T max.T rem.T"),
    (
        "s32 s64 u32 u64",
        "T T",
        "pred",
        "setp.eq.T setp.ne.T setp.lt.T setp.le.T setp.gt.T setp.ge.T",
    ),
    ("s32 s64 u32 u64 s16 u16", "T u32", "T", "shr.T"),
    ("s32 u32", "T T", "T", "mul.hi.T"),
    ("s32 u32 s64", "T T T", "T", "mad.lo.T"),
    ("s32", "T T", "s64", "mul.wide.T"),
    ("u32", "T T", "u64", "mul.wide.T"),
    ("u16", "T T", "u32", "mul.wide.T"),
    ("s32", "T T s64", "s64", "mad.wide.T"),
    ("u32", "T T u64", "u64", "mad.wide.T"),
    ("s32 u32", "T u32 u32", "T", "bfe.T"),
    ("s32 s64", "T", "T", "neg.T"),
    ("s16", "T T", "T", "add.T mul.hi.T mul.lo.T"),
    ("b16 b32 b64", "T T", "pred", "setp.eq.T setp.ne.T"),
    ("b16 b32 b64", "T u32", "T", "shl.T"),
    ("b16 b32 b64 pred", "T T", "T", "and.T or.T xor.T"),
    ("b16 b32 b64 pred", "T", "T", "not.T"),
    ("b16 b32 b64 u16 u64 f32 f64", "T T pred", "T", "selp.T"),
    ("b32 b64", "T", "u32", "clz.T popc.T"),
    ("b32", "T T T", "T", "prmt.T"),
    ("f16 bf16", "T", "f32", "cvt.f32.T"),
    ("f16 bf16", "f32", "T", "cvt.rn.T.f32"),
    ("f16x2 bf16x2", "f32 f32", "T", "cvt.rn.T.f32"),
    ("f64 s32 s64", "T", "f32", "cvt.rn.f32.T"),
    ("s32 s64 u64", "T", "f64", "cvt.rn.f64.T"),
    ("f32 f16", "T", "f64", "cvt.f64.T"),
    ("f64", "T", "s64", "cvt.rzi.s64.T"),
    ("f32", "T", "s32", "cvt.rzi.s32.T"),
    ("f32", "T", "u32", "cvt.rzi.u32.T"),
    ("s32", "T", "s64", "cvt.s64.T"),
    ("s16", "T", "s32", "cvt.s32.T"),
    ("u32 u16", "T", "u64", "cvt.u64.T"),
    ("u64 u16", "T", "u32", "cvt.u32.T"),
    ("u32 u64", "T", "u16", "cvt.u16.T"),
    ("f16 f16x2 bf16 bf16x2", "T", "T", "abs.T neg.T"),
    ("f16 f16x2", "T T", "T", "add.rn.T mul.rn.T"),
)
SINCE_SM_90 = (
    ("bf16 bf16x2", "T T", "T", "add.rn.T mul.rn.T"),
    ("bf16", "T", "f64", "cvt.f64.T"),
)
LOP3_TABLES = (0x96, 0xE8, 0xCA)
PRODUCT = (
    "{ .reg .b32 %l, %h; mov.b64 {%l, %h}, %s2; mad.lo.cc.s32 %l, %s0, %s1, %l; "
    "madc.hi.s32 %h, %s0, %s1, %h; mov.b64 %r, {%l, %h}; }"
)


def _instructions() -> Iterator[Instruction]:
    for oldest, forms in ((80, FORMS), (90, SINCE_SM_90)):
        for kinds, sources, result, opcodes in forms:
            for kind, opcode in product(kinds.split(), opcodes.split()):
                types = tuple(sources.replace("T", kind).split())
                name = opcode.replace("T", kind)
                yield Instruction(name, types, result.replace("T", kind), oldest=oldest)
    for table in LOP3_TABLES:
        yield Instruction("lop3.b32", ("b32", "b32", "b32"), "b32", immediate=(table,))
    yield Instruction("bfi.b64", ("b64", "b64"), "b64", immediate=(32, 32))
    for opcode in ("mad.lo.cc.s32", "madc.hi.s32"):
        yield Instruction(opcode, ("s32", "s32", "s64"), "s64", within=PRODUCT)


INSTRUCTIONS = tuple(_instructions())


def run() -> Iterator[Figures]:
    """Run every instruction over COUNT operands on the GPU and in replay.

    Raises:
        Broken: some element differs.
    """
    major, minor = torch.cuda.get_device_capability()
    present = [known for known in INSTRUCTIONS if known.oldest <= 10 * major + minor]
    loaded = loaded_or_refused(present, "sm_90" if major >= 9 else f"sm_{major}{minor}")
    wrong = []
    for instruction in present:
        sources = operands(instruction)
        buffers = [torch.from_numpy(source.view(np.uint8)).cuda() for source in sources]
        size = REGISTERS[instruction.result][1]
        result = torch.zeros(COUNT * size, dtype=torch.uint8, device="cuda")
        unused = [0] * (MOST_SOURCES - len(buffers))
        arguments: list[Argument] = [*buffers, *unused, result, COUNT]
        loaded.launch(instruction.entry, COUNT // THREADS, THREADS, arguments)
        got = result.cpu().numpy().view(UNSIGNED[size])
        difference = first_difference(instruction, got, replayed(instruction, sources))
        if difference >= 0:
            given = ", ".join(hex(int(source[difference])) for source in sources)
            wrong.append(f"{instruction.opcode} of {given}: {hex(int(got[difference]))} on cuda")
    if wrong:
        raise Broken(f"{len(wrong)} instructions differ: {'; '.join(wrong[:8])}")
    absent = [known.opcode for known in INSTRUCTIONS if known not in present]
    yield {"instructions": len(present), "operands": COUNT, "not on this GPU": absent}


def loaded_or_refused(instructions: Sequence[Instruction], target: str) -> Loaded:
    """The module of all instructions, compiled by the driver.

    Raises:
        Skipped: there is no driver library.
        Broken: the driver refuses the text.
    """
    try:
        return Loaded(module(instructions, VERSION, target))
    except NoDriver as error:
        raise Skipped(str(error)) from error
    except RefusedByDriver as error:
        raise Broken(str(error)) from error


def operands(instruction: Instruction) -> list[Bits]:
    """COUNT values for each source: a third random bits, a third edges, a third near one."""
    generator = np.random.default_rng(zlib.crc32(instruction.entry.encode()))
    found = [_values(kind, generator) for kind in instruction.sources]
    if instruction.opcode.startswith("rem"):
        # Division by zero is undefined, and so may be that of the least number by -1.
        found[1] = (found[1] >> found[1].dtype.type(1)) | found[1].dtype.type(1)
    return found


def _values(kind: str, generator: np.random.Generator) -> Bits:
    size = REGISTERS[kind][1]
    dtype = np.dtype(UNSIGNED[size])
    if kind == "pred":
        return generator.integers(0, 2, COUNT, dtype=np.uint32)
    top = (1 << (8 * size)) - 1
    found = generator.integers(0, top, COUNT, dtype=dtype, endpoint=True)
    place = generator.integers(0, 3, COUNT)
    edges = np.array(sorted(_edges(kind, top)), dtype)
    found[place == 1] = generator.choice(edges, int((place == 1).sum()))
    low = generator.integers(0, 64, int((place == 2).sum())).astype(dtype)
    exponent, mantissa = FLOATS.get(kind, (0, 0))
    one = ((1 << exponent) // 2 - 1) << mantissa if exponent else 0
    # Around one for floats, where ties and cancellation are; small integers otherwise.
    found[place == 2] = dtype.type(one) + low
    return found


def _edges(kind: str, top: int) -> set[int]:
    """Bit patterns at the ends of ranges, and one step to either side of them."""
    half = (top + 1) // 2
    middles = {0, half, top}
    if kind in FLOATS:
        exponent, mantissa = FLOATS[kind]
        infinity = ((1 << exponent) - 1) << mantissa
        one = ((1 << (exponent - 1)) - 1) << mantissa
        middles |= {1 << mantissa, infinity, one, one + (1 << mantissa)}
    near = {middle + step for middle in middles for step in (-1, 0, 1)}
    signed = near | {value + half for value in near} if kind in FLOATS else near
    return {value & top for value in signed}


def replayed(instruction: Instruction, sources: Sequence[Bits]) -> Bits:
    """The result of the same PTX text on replay, as bits."""
    size = REGISTERS[instruction.result][1]
    result = torch.zeros(COUNT * size, dtype=torch.uint8)
    buffers: list[torch.Tensor | int | float | bytes] = [
        torch.from_numpy(source.view(np.uint8)) for source in sources
    ]
    buffers += [0] * (MOST_SOURCES - len(buffers))
    text, grid = module([instruction], VERSION, "sm_90"), (COUNT // THREADS,)
    run_ptx(text, instruction.entry, grid, (THREADS,), [*buffers, result, COUNT])
    return result.numpy().view(UNSIGNED[size])


def first_difference(instruction: Instruction, got: Bits, want: Bits) -> int:
    """Index of the first element that differs, NaN payloads apart; -1 if none does."""
    kind = instruction.result.removesuffix("x2")
    if kind != instruction.result:
        got, want = got.view(np.uint16), want.view(np.uint16)
    differs = got != want
    if kind in FLOATS:
        differs &= ~(_is_nan(kind, got) & _is_nan(kind, want))
    places = np.flatnonzero(differs)
    halves = 2 if kind != instruction.result else 1
    return int(places[0]) // halves if places.size else -1


def _is_nan(kind: str, bits: Bits) -> npt.NDArray[np.bool_]:
    exponent, mantissa = FLOATS[kind]
    infinity = ((1 << exponent) - 1) << mantissa
    magnitude = bits & bits.dtype.type((1 << (exponent + mantissa)) - 1)
    return np.asarray(magnitude > bits.dtype.type(infinity))
