"""The committed corpus: which compiler made which text of which kernel."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from twinstep.replay.corpus.text import Text

_ABOVE = Path(__file__).resolve().parents
ROOT = next((folder for folder in _ABOVE if (folder / "pyproject.toml").exists()), Path.cwd())
"""The checkout, or the folder at hand where replay is installed without one."""

DATA = Path(__file__).parent / "data"
MANIFEST = DATA / "manifest.json"
ARCHIVE = DATA / "ptx.tar.xz"


@dataclass(frozen=True)
class Entry:
    """One compilation.

    Attributes:
        case: Name of the case.
        compiler: "triton-3.7.1" or "nvrtc-12.9".
        sm: Compute capability asked for, for instance 90.
        kernel: Name of the entry in the text.
        version: Of the PTX language.
        target: As the text says, for instance "sm_90a".
        shared: Bytes of dynamic shared memory.
        body: Digest of the text without its head.
    """

    case: str
    compiler: str
    sm: int
    kernel: str
    version: str
    target: str
    shared: int
    body: str


@dataclass(frozen=True)
class Corpus:
    """Everything that is committed.

    Attributes:
        tools: By compiler: its versions and the command that compiles.
        sources: By case: SHA-256 of the kernel's source, grid, block, constants, options.
        entries: Sorted by case, compiler and target.
        bodies: Text by digest.
    """

    tools: dict[str, dict[str, str]]
    sources: dict[str, dict[str, object]]
    entries: tuple[Entry, ...]
    bodies: dict[str, str]

    def text(self, entry: Entry) -> Text:
        """The text of one compilation."""
        return Text(entry.version, entry.target, self.bodies[entry.body])

    def distinct(self) -> list[Entry]:
        """One entry for each kernel and body: the first of those that share it."""
        first: dict[tuple[str, str], Entry] = {}
        for entry in self.entries:
            first.setdefault((entry.case, entry.body), entry)
        return list(first.values())


def write(corpus: Corpus, folder: Path = DATA) -> None:
    """Write manifest and archive; equal contents give equal bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(
        json.dumps([getattr(entry, name) for name in _FIELDS]) for entry in corpus.entries
    )
    head = json.dumps(
        {"tools": corpus.tools, "sources": corpus.sources, "fields": _FIELDS}, indent=1
    )
    (folder / MANIFEST.name).write_text(f'{head[:-2]},\n "entries": [\n{rows}\n]}}\n')
    with tarfile.open(folder / ARCHIVE.name, "w:xz", format=tarfile.USTAR_FORMAT) as archive:
        # Neighbours in the archive compress each other: all texts of one kernel together.
        for entry in corpus.distinct():
            data = corpus.bodies[entry.body].encode()
            member = tarfile.TarInfo(f"{entry.case}/{entry.body}.ptx")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


_FIELDS = list(Entry.__dataclass_fields__)


@cache
def read(folder: Path = DATA) -> Corpus:
    """Read what `write` wrote."""
    manifest = json.loads((folder / MANIFEST.name).read_text())
    entries = tuple(
        Entry(**dict(zip(manifest["fields"], row, strict=True))) for row in manifest["entries"]
    )
    bodies: dict[str, str] = {}
    with tarfile.open(folder / ARCHIVE.name, "r:xz") as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            bodies[Path(member.name).stem] = file.read().decode()
    return Corpus(manifest["tools"], manifest["sources"], entries, bodies)
