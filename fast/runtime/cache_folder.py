"""The folder for what is compiled at first use, and its files, each with a digest at its end.

A file that is not what was written (a full disk, a copy that was cut short) is like none.
"""

import hashlib
import os
import tempfile
from pathlib import Path

SEAL = hashlib.sha256().digest_size


def cache_folder() -> Path:
    """The user's cache folder of this package, made if it is not there."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    # Checkouts that write files otherwise share the folder above: another format, another name.
    folder = Path(base) / "twinstep" / "sealed"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def keep(path: Path, data: bytes) -> None:
    """Write a file whole, and a digest of it behind it. Loaders of ELF do not mind."""
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        made = Path(place) / path.name
        made.write_bytes(data + hashlib.sha256(data).digest())
        os.replace(made, path)


def kept(path: Path) -> bytes | None:
    """The bytes that were written to a file; None if there is none, or it holds anything else."""
    if not path.exists():
        return None
    found = path.read_bytes()
    data = found[:-SEAL]
    return data if hashlib.sha256(data).digest() == found[-SEAL:] else None
