"""Part: pure instructions compute the same bits on the GPU as in replay.

The list holds every arithmetic, logic and conversion instruction that compiled kernels of ours use
(a test compares it with what replay executes). Approximate instructions are left out: the GPU's
error is the vendor's business, and replay charges it to the bound.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from twinstep.benchmarks.part import Broken, Figures, Skipped, require_gpu
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


def _all() -> Iterator[Instruction]:
    for kind in ("f32", "f64"):
        for name in ("add.rn", "sub.rn", "mul.rn", "div.rn"):
            yield Instruction(f"{name}.{kind}", (kind, kind), kind)
        for name in ("min", "max"):
            yield Instruction(f"{name}.{kind}", (kind, kind), kind)
        for name in ("sqrt.rn", "rcp.rn", "abs", "neg"):
            yield Instruction(f"{name}.{kind}", (kind,), kind)
        yield Instruction(f"fma.rn.{kind}", (kind, kind, kind), kind)
        for test in ("eq", "ne", "lt", "le", "gt", "ge", "neu", "equ", "ltu", "gtu", "num", "nan"):
            yield Instruction(f"setp.{test}.{kind}", (kind, kind), "pred")
    for name in ("min.NaN.f32", "max.NaN.f32"):
        yield Instruction(name, ("f32", "f32"), "f32")
    yield from _integers()
    yield from _logic()
    yield from _conversions()
    yield from _halves()


def _integers() -> Iterator[Instruction]:
    for kind in ("s32", "s64", "u32", "u64"):
        for name in ("add", "sub", "mul.lo", "min", "max", "rem"):
            yield Instruction(f"{name}.{kind}", (kind, kind), kind)
        for test in ("eq", "ne", "lt", "le", "gt", "ge"):
            yield Instruction(f"setp.{test}.{kind}", (kind, kind), "pred")
        yield Instruction(f"shr.{kind}", (kind, "u32"), kind)
    for kind in ("s32", "u32"):
        wide = kind.replace("32", "64")
        yield Instruction(f"mul.wide.{kind}", (kind, kind), wide)
        yield Instruction(f"mad.wide.{kind}", (kind, kind, wide), wide)
        yield Instruction(f"mad.lo.{kind}", (kind, kind, kind), kind)
        yield Instruction(f"mul.hi.{kind}", (kind, kind), kind)
        yield Instruction(f"bfe.{kind}", (kind, "u32", "u32"), kind)
    yield Instruction("mad.lo.s64", ("s64", "s64", "s64"), "s64")
    for kind in ("s32", "s64"):
        yield Instruction(f"neg.{kind}", (kind,), kind)
    for name in ("add.s16", "mul.hi.s16", "mul.lo.s16"):
        yield Instruction(name, ("s16", "s16"), "s16")
    for kind in ("s16", "u16"):
        yield Instruction(f"shr.{kind}", (kind, "u32"), kind)


def _logic() -> Iterator[Instruction]:
    for kind in ("b16", "b32", "b64"):
        for test in ("eq", "ne"):
            yield Instruction(f"setp.{test}.{kind}", (kind, kind), "pred")
        yield Instruction(f"shl.{kind}", (kind, "u32"), kind)
    for kind in ("b16", "b32", "b64", "pred"):
        for name in ("and", "or", "xor"):
            yield Instruction(f"{name}.{kind}", (kind, kind), kind)
        yield Instruction(f"not.{kind}", (kind,), kind)
    for kind in ("b32", "b64", "f32", "f64", "b16"):
        yield Instruction(f"selp.{kind}", (kind, kind, "pred"), kind)
    for kind in ("b32", "b64"):
        yield Instruction(f"clz.{kind}", (kind,), "u32")
        yield Instruction(f"popc.{kind}", (kind,), "u32")
    yield Instruction("prmt.b32", ("b32", "b32", "b32"), "b32")
    for table in (0x96, 0xE8, 0xCA):
        yield Instruction("lop3.b32", ("b32", "b32", "b32"), "b32", immediate=table)


def _halves() -> Iterator[Instruction]:
    for kind, oldest in (("f16", 80), ("bf16", 90)):
        for each in (kind, f"{kind}x2"):
            yield Instruction(f"add.rn.{each}", (each, each), each, oldest=oldest)
            yield Instruction(f"mul.rn.{each}", (each, each), each, oldest=oldest)
            yield Instruction(f"abs.{each}", (each,), each)
            yield Instruction(f"neg.{each}", (each,), each)


def _conversions() -> Iterator[Instruction]:
    pairs = (
        ("f32.f16", "f16", "f32"),
        ("f32.bf16", "bf16", "f32"),
        ("rn.f16.f32", "f32", "f16"),
        ("rn.bf16.f32", "f32", "bf16"),
        ("rn.f32.f64", "f64", "f32"),
        ("f64.f32", "f32", "f64"),
        ("f64.f16", "f16", "f64"),
        ("rn.f32.s32", "s32", "f32"),
        ("rn.f32.s64", "s64", "f32"),
        ("rn.f64.s32", "s32", "f64"),
        ("rn.f64.s64", "s64", "f64"),
        ("rn.f64.u64", "u64", "f64"),
        ("rzi.s64.f64", "f64", "s64"),
        ("rzi.s32.f32", "f32", "s32"),
        ("s64.s32", "s32", "s64"),
        ("u64.u32", "u32", "u64"),
        ("u32.u64", "u64", "u32"),
        ("u16.u32", "u32", "u16"),
        ("u32.u16", "u16", "u32"),
        ("u16.u64", "u64", "u16"),
        ("u64.u16", "u16", "u64"),
        ("s32.s16", "s16", "s32"),
    )
    for modifiers, source, result in pairs:
        yield Instruction(f"cvt.{modifiers}", (source,), result)
    yield Instruction("cvt.f64.bf16", ("bf16",), "f64", oldest=90)
    for packed in ("f16x2", "bf16x2"):
        yield Instruction(f"cvt.rn.{packed}.f32", ("f32", "f32"), packed)


INSTRUCTIONS = tuple(_all())


def run() -> Figures:
    """Run every instruction over COUNT operands on the GPU and in replay.

    Raises:
        Broken: some element differs.
    """
    require_gpu()
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
    return {"instructions": len(present), "operands": COUNT, "not on this GPU": absent}


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
    """What replay makes of the same PTX text, as bits."""
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
