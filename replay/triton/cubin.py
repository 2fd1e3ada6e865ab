"""Registers and local memory of a compiled kernel, read from its binary.

The section `.nv.info` of a cubin holds attributes of four bytes and a value: format, name, size.
Those of a kernel begin with the index of its symbol.
"""

from __future__ import annotations

import struct

_SIZED = 4
_REGISTERS, _FRAME = 0x2F, 0x11


def resources(binary: bytes, kernel: str) -> tuple[int, int]:
    """Registers and bytes of local memory of a thread, as the CUDA driver reports them.

    Args:
        binary: A cubin.
        kernel: Name of an entry.

    Returns:
        Zeros where the binary is no 64-bit ELF file, or names no such kernel.
    """
    if binary[:5] != b"\x7fELF\x02":
        return 0, 0
    sections = _sections(binary)
    names = _symbols(binary, sections)
    found = {_REGISTERS: 0, _FRAME: 0}
    start, size = sections.get(".nv.info", (0, 0))
    end = start + size
    while start + 4 <= end:
        form, name, length = struct.unpack_from("<BBH", binary, start)
        sized = form == _SIZED
        if sized and name in found and length == 8:
            symbol, value = struct.unpack_from("<II", binary, start + 4)
            if names.get(symbol) == kernel:
                found[name] = value
        start += 4 + (length if sized else 0)
    return found[_REGISTERS], found[_FRAME]


def _sections(binary: bytes) -> dict[str, tuple[int, int]]:
    """Offset and size of every section."""
    (table,) = struct.unpack_from("<Q", binary, 0x28)
    size, count, names = struct.unpack_from("<HHH", binary, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", binary, table + i * size) for i in range(count)]
    strings = rows[names][4]
    return {_text(binary, strings + row[0]): row[4:6] for row in rows}


def _symbols(binary: bytes, sections: dict[str, tuple[int, int]]) -> dict[int, str]:
    """Names of symbols by index."""
    start, size = sections.get(".symtab", (0, 0))
    strings = sections.get(".strtab", (0, 0))[0]
    return {
        index: _text(binary, strings + struct.unpack_from("<I", binary, start + 24 * index)[0])
        for index in range(size // 24)
    }


def _text(binary: bytes, start: int) -> str:
    return binary[start : binary.index(b"\0", start)].decode()
