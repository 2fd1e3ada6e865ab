"""PTX text as the corpus keeps it: without what no execution can see, and where it came from."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

HOME = "/".join(("parity", "replay", "corpus", ""))
"""The folder in which the corpus was first made: part of its texts, and so of their digests."""
_FOLDERS = {"replay/corpus/": HOME, "fast/kernels/": "fast/kernels/", "triton/": "triton/"}
_SECTION = re.compile(r"^\s*\.section\s+\.debug\w*\s*\{[^}]*\}", re.M)
_FILE = re.compile(r'(\.file\s+\d+\s+)"([^"]*)"(?:\s+"([^"]*)")?([^\n]*)')
_COMMENT = re.compile(r"//(?! (?:begin|end) inline asm).*$", re.M)
_HEAD = re.compile(r"^\.(version|target)\s+([^\n]*?)\s*\n", re.M)


@dataclass(frozen=True)
class Text:
    """A PTX module as its version, its target and all the rest, which versions often share."""

    version: str
    target: str
    body: str

    @property
    def whole(self) -> str:
        """The module as a compiler wrote it."""
        return f".version {self.version}\n.target {self.target}\n{self.body}"

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of the body's SHA-256."""
        return hashlib.sha256(self.body.encode()).hexdigest()[:16]


def normalised(ptx: str) -> Text:
    """Drop debug sections, comments and the folders of source files; keep `.loc`."""
    ptx = _COMMENT.sub("", _SECTION.sub("", ptx))
    ptx = _FILE.sub(_short, ptx)
    head = dict(_HEAD.findall(ptx))
    lines = (line.rstrip() for line in _HEAD.sub("", ptx).splitlines())
    body = "\n".join(line for line in lines if line) + "\n"
    return Text(head["version"], head["target"].replace(", debug", ""), body)


def _short(match: re.Match[str]) -> str:
    path = "/".join(part for part in (match[2], match[3]) if part)
    for start, name in _FOLDERS.items():
        if start in path:
            path = name + path.rpartition(start)[2]
    return f'{match[1]}"{path}"'
