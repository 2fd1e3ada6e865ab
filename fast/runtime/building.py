"""C++ compiled at first use and kept in the user's cache folder.

A library is kept under a digest of its sources, flags, compiler and whatever else it depends on;
processes that need it at once wait for the first.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twinstep.fast.runtime.cache_folder import cache_folder

COMPILERS = ("c++", "g++", "clang++")
SECONDS = 600  # for a build, beside other work too


@dataclass(frozen=True, kw_only=True)
class Source:
    """Sources of a library.

    Attributes:
        name: of the library, among others in the cache folder.
        what: it is, in messages.
        where: it is used, in messages.
        main: the file that is compiled.
        files: text of every source file by name.
    """

    name: str
    what: str
    where: str
    main: str
    files: Mapping[str, str]


def built(source: Source, flags: Sequence[str], facts: Sequence[str] = ()) -> Path:
    """The library of some sources; compiled unless the cache has it.

    Args:
        source: what is built.
        flags: of the compiler.
        facts: what else the library depends on, such as versions of headers.

    Raises:
        RuntimeError: there is no compiler, or it fails, or nothing can be written.
    """
    compiler = _compiler(source)
    files = {name: text.encode() for name, text in sorted(source.files.items())}
    found = Path(compiler).resolve()
    known = [*flags, *facts, str(found), str(found.stat().st_mtime_ns), platform.machine()]
    facts_and_files = "\0".join([*known, *files]).encode() + b"\0".join(files.values())
    digest = hashlib.sha256(facts_and_files).hexdigest()[:16]
    try:
        folder = cache_folder()
        target = folder / f"{source.name}-{digest}.so"
        if not target.exists():
            with (folder / f"{source.name}-{digest}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not target.exists():
                    _compile([compiler, *flags], source, files, target)
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(
            f"the {source.what} cannot be built: {error} [{source.where}]"
        ) from error
    return target


def _compiler(source: Source) -> str:
    """The user's CXX, or the first compiler that there is."""
    wanted = os.environ.get("CXX", "")
    names = (wanted,) if wanted else COMPILERS
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return found
    raise RuntimeError(
        f"there is no C++ compiler ({', '.join(names)}), but {source.what} are compiled at first "
        f"use: install g++ or clang++, or name one in CXX [{source.where}]"
    )


def _compile(
    command: Sequence[str], source: Source, files: Mapping[str, bytes], target: Path
) -> None:
    """Compile beside the target, and move it there whole."""
    with tempfile.TemporaryDirectory(dir=target.parent) as place:
        for name, text in files.items():
            (Path(place) / name).write_bytes(text)
        made = Path(place) / target.name
        call = [*command, str(Path(place) / source.main), "-o", str(made)]
        done = subprocess.run(call, capture_output=True, text=True, timeout=SECONDS, check=False)
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), "")
            raise RuntimeError(
                f"{command[0]} ended with {done.returncode}, but should compile the "
                f"{source.what}: {first.removeprefix(place)} [{source.where}]"
            )
        os.replace(made, target)
