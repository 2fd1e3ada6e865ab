"""Facts read off what the compiler wrote: PTX and cubin for NVIDIA, assembly and hsaco for AMD.

Counts of instructions are static, in the text of the kernel, whatever runs how often.
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path

import triton

Facts = dict[str, int]

# A fact must not rise above what is recorded ...
CEILINGS = (
    "registers",
    "spilled",
    "local",
    "shared",
    "approximate",
    "contracted",
    "float64",
    "code",
    "loop",
)
# ... or must not fall below.
FLOORS = ("load_width", "store_width", "vector")
MEANING = {
    "registers": "registers of a thread (AMD: vector registers)",
    "spilled": "bytes of spill stores and loads of a thread (AMD: spilled vector registers)",
    "local": "bytes of local (scratch) memory of a thread",
    "shared": "bytes of shared memory of a block",
    "approximate": "instructions that are approximate or flush subnormals",
    "contracted": "fused multiply-adds, and sums and products that may be fused",
    "float64": "arithmetic instructions in float64",
    "code": "bytes of machine code",
    "loop": "instructions of a thread in one turn of the main loop; loop_* of them by class",
    "load_width": "bytes of the widest load from global memory",
    "store_width": "bytes of the widest store to global memory",
    "vector": "bytes that all accesses wider than 4 bytes move together, for each thread",
}

_OPCODE = re.compile(r"^\s+(?:@!?%\w+\s+)?([a-z]\w*(?:[.:]+\w+)*)\s", re.MULTILINE)
_FLOAT = r"(?:f16|bf16|f32|f64|f16x2|bf16x2|f32x2)$"
_APPROXIMATE = re.compile(r"\.(?:approx|full|ftz)\b|^(?:ex2|lg2|sin|cos|tanh)\.")
_CONTRACTED = re.compile(rf"^(?:fma|mad)\..*{_FLOAT}|^(?:add|sub|mul)\.{_FLOAT}")
_FLOAT64 = re.compile(r"^(?:abs|add|sub|mul|div|fma|mad|min|max|neg|rcp|rsqrt|sqrt|setp)\b.*\.f64$")
_ONE = re.compile(r"mov\.b(?:16|32)\s+(%\w+), (?:0x3F80|16256|1065369472|0x3C00|15360|1006648320);")
_FMA16 = re.compile(r"\sfma\.rn\.b?f16(?:x2)?\s+%\w+, %\w+, (%\w+), %\w+;")
_PTX_ACCESS = re.compile(r"\b(ld|st)\.global[\w.:]*?(?:\.v(\d))?\.[busf](\d+)\s")
_AMD_ACCESS = re.compile(
    r"\b(?:global|flat|buffer)_(load|store)_(\w+)|\b(s)_(?:load|store)_dword\w*"
)
_AMD_BYTES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}


def of_ptx(ptx: str) -> Facts:
    """Facts from the text of a PTX module."""
    opcodes = _OPCODE.findall(ptx)
    accesses = [
        (kind, int(count or 1) * int(bits) // 8) for kind, count, bits in _PTX_ACCESS.findall(ptx)
    ]
    return {
        "approximate": sum(bool(_APPROXIMATE.search(opcode)) for opcode in opcodes),
        "contracted": sum(bool(_CONTRACTED.match(opcode)) for opcode in opcodes) - _sums(ptx),
        "float64": sum(bool(_FLOAT64.match(opcode)) for opcode in opcodes),
        **_widths([("load" if kind == "ld" else "store", size) for kind, size in accesses]),
    }


def _sums(ptx: str) -> int:
    """Fused multiply-adds with a factor 1: how sm_80, which has no other, adds in bf16."""
    ones = set(_ONE.findall(ptx))
    return sum(one in ones for one in _FMA16.findall(ptx))


def _widths(accesses: Iterable[tuple[str, int]]) -> Facts:
    rows = list(accesses)
    return {
        "load_width": max((size for kind, size in rows if kind == "load"), default=0),
        "store_width": max((size for kind, size in rows if kind == "store"), default=0),
        "vector": sum(size for _, size in rows if size > 4),
    }


def of_usage(text: str) -> Facts:
    """Facts from `cuobjdump -res-usage` of a cubin; `local` holds what was spilled, too."""
    found = {
        name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)
    }
    if "REG" not in found:
        raise ValueError(f"cuobjdump names no registers: {text.strip()!r}")
    return {
        "registers": found["REG"],
        "local": found["STACK"] + found["LOCAL"],
        "shared": found["SHARED"],
    }


def run_tool(*command: str) -> str:
    """Output and errors of a program that succeeds.

    Raises:
        RuntimeError: it fails.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        name = Path(command[0]).name
        raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout + done.stderr


def cuobjdump(*arguments: str) -> str:
    """Output of Triton's `cuobjdump`."""
    return run_tool(triton.knobs.nvidia.cuobjdump.path, *arguments)


def spilled(log: str) -> int:
    """Bytes of spill stores and loads in what `ptxas -v` prints."""
    return sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log)))


def of_amdgcn(text: str) -> Facts:
    """Facts from the text of an AMD assembly file.

    Whether arithmetic was contracted cannot be seen: the correctly rounded division and square
    root are sequences of fused multiply-adds there.
    """
    found = {
        name: int(value)
        for name, value in re.findall(
            r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size|group_segment_fixed_size)"
            r":\s+(\d+)",
            text,
        )
    }
    accesses = [
        (kind, _AMD_BYTES.get(size, 2 if "short" in size or "b16" in size else 1))
        for kind, size, _ in _AMD_ACCESS.findall(text)
        if kind
    ]
    return {
        "registers": found["vgpr_count"],
        "spilled": found["vgpr_spill_count"],
        "local": found["private_segment_fixed_size"],
        "shared": found["group_segment_fixed_size"],
        "float64": len(re.findall(r"^\s+v_(?:add|mul|div\w*|fma\w*|sqrt|rcp)_f64", text, re.M)),
        **_widths(accesses),
    }


def code_bytes(binary: bytes, kernel: str = "") -> int:
    """Size of the machine code in an ELF file: its sections `.text` and `.text.*`, or one kernel's.

    Not the file's size, which depends on the paths of the source in its line table.
    """
    if binary[:5] != b"\x7fELF\x02":
        raise ValueError("the compiled kernel is no 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", binary, 0x28)
    size, count, names = struct.unpack_from("<HHH", binary, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", binary, table + i * size) for i in range(count)]
    strings = sections[names][4]
    total = 0
    for name, _, _, _, _, length in sections:
        start = strings + name
        section = binary[start : binary.index(b"\0", start)].decode()
        if section == f".text.{kernel}" if kernel else section.startswith(".text"):
            total += length
    return int(total)
