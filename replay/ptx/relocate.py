"""Source paths of a compiled kernel that was compiled from another folder.

Triton's cache knows a kernel by its text, not by where it lies: the PTX that it returns names the
files of whichever checkout compiled it first.
"""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path, PurePosixPath

_FILE = re.compile(r'^(\s*\.file\s+\d+\s+)"([^"]*)"(?:\s+"([^"]*)")?', re.M)


def relocate(ptx: str, source: str) -> str:
    """PTX whose `.file` directives name the files that the kernel has now.

    Args:
        ptx: Text of a compiled kernel.
        source: Absolute path of the file that holds the kernel.

    Returns:
        The text itself if it names `source` or no file of that name. Otherwise the folder in
        which its path differs from `source` is exchanged, in every file that exists there.
    """
    named = [_path(match) for match in _FILE.finditer(ptx)]
    here = PurePosixPath(source)
    alike = [path for path in named if path.name == here.name]
    if here in named or not alike:
        return ptx
    stale = max(alike, key=lambda path: _common(path, here))
    shared = _common(stale, here)
    old, new = _without(stale, shared), _without(here, shared)

    def exchange(match: re.Match[str]) -> str:
        path = _path(match)
        moved = new / path.relative_to(old) if path.is_relative_to(old) else path
        return f'{match[1]}"{moved}"' if Path(moved).exists() else match[0]

    return _FILE.sub(exchange, ptx)


def _path(match: re.Match[str]) -> PurePosixPath:
    return PurePosixPath(match[2]) / (match[3] or "")


def _common(a: PurePosixPath, b: PurePosixPath) -> int:
    """Number of trailing parts that two paths have in common."""
    pairs = zip(reversed(a.parts[1:]), reversed(b.parts[1:]), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _without(path: PurePosixPath, last: int) -> PurePosixPath:
    return PurePosixPath(*path.parts[: len(path.parts) - last])
