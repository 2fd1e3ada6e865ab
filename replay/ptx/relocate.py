"""Source paths of a compiled kernel that was compiled from another folder.

Triton's cache knows a kernel by its text, not by where it lies: the PTX that it returns names the
files of whichever checkout compiled it first.
"""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path, PurePosixPath

_LINE = re.compile(r"^\s*\.loc\s+(\d+)\s+(?!.*inlined_at)", re.M)
_FILE = re.compile(r'^(\s*\.file\s+(\d+)\s+)"([^"]*)"(?:\s+"([^"]*)")?', re.M)


def relocate(ptx: str, source: str) -> str:
    """PTX whose `.file` directives name the files that the kernel has now.

    Args:
        ptx: Text of a compiled kernel.
        source: Absolute path of the file that holds the kernel.

    Returns:
        The text itself if its first line of code is of `source`, or it has none. Otherwise the file
        of that line is exchanged; and where both have one name, the folder in which their paths
        differ, too, in every file that exists there.
    """
    named = {match[2]: _path(match) for match in _FILE.finditer(ptx)}
    # Functions that are not inlined stand before the kernel, and may be another file's.
    here, first = PurePosixPath(source), _LINE.search(ptx, max(ptx.find(".entry"), 0))
    stale = named.get(first[1]) if first else None
    if stale is None or stale == here or not source:
        return ptx
    shared = _common(stale, here)
    old, new = _without(stale, shared), _without(here, shared)

    def exchange(match: re.Match[str]) -> str:
        path = _path(match)
        if path == stale:
            return f'{match[1]}"{here}"'
        moved = new / path.relative_to(old) if shared and path.is_relative_to(old) else path
        return f'{match[1]}"{moved}"' if Path(moved).exists() else match[0]

    return _FILE.sub(exchange, ptx)


def _path(match: re.Match[str]) -> PurePosixPath:
    return PurePosixPath(match[3]) / (match[4] or "")


def _common(a: PurePosixPath, b: PurePosixPath) -> int:
    """Number of trailing parts that two paths have in common."""
    pairs = zip(reversed(a.parts[1:]), reversed(b.parts[1:]), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _without(path: PurePosixPath, last: int) -> PurePosixPath:
    return PurePosixPath(*path.parts[: len(path.parts) - last])
