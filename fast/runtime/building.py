"""C++ compiled at first use and kept in the user's cache folder.

A library is kept under a digest of its sources, flags, compiler and whatever else it depends on,
and taken only as it was written; processes that need it at once wait for the first.
"""

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twinstep.fast.runtime.cache_folder import cache_folder, keep, kept

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
    command = _compiler(source)
    files = {name: text.encode() for name, text in sorted(source.files.items())}
    found = Path(command[0]).resolve()
    flags = [*command[1:], *flags]
    known = [*flags, *facts, str(found), str(found.stat().st_mtime_ns), platform.machine()]
    facts_and_files = "\0".join([*known, *files]).encode() + b"\0".join(files.values())
    digest = hashlib.sha256(facts_and_files).hexdigest()[:16]
    try:
        folder = cache_folder()
        target = folder / f"{source.name}-{digest}.so"
        if kept(target) is None:
            with (folder / f"{source.name}-{digest}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if kept(target) is None:
                    _compile([command[0], *flags], source, files, target)
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(
            f"the {source.what} cannot be built and kept: {error}; XDG_CACHE_HOME chooses another "
            f"folder [{source.where}]"
        ) from error
    return target


def _compiler(source: Source) -> list[str]:
    """The user's CXX, with its arguments, or the first compiler that there is."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    names = wanted[:1] or COMPILERS
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return [found, *wanted[1:]]
    raise RuntimeError(
        f"there is no C++ compiler ({', '.join(names)}), but {source.what} are compiled at first "
        f"use: install g++ or clang++, or name one in CXX [{source.where}]"
    )


def _compile(
    command: Sequence[str], source: Source, files: Mapping[str, bytes], target: Path
) -> None:
    """Compile in a folder of its own, and keep the library."""
    with tempfile.TemporaryDirectory() as place:
        for name, text in files.items():
            (Path(place) / name).write_bytes(text)
        made = Path(place) / target.name
        call = [*command, str(Path(place) / source.main), "-o", str(made)]
        done = subprocess.run(call, capture_output=True, text=True, timeout=SECONDS, check=False)
        if done.returncode or not made.exists():
            lines = [line for line in done.stderr.splitlines() if "error" in line]
            first = lines[0] if lines else "it does not say why"
            raise RuntimeError(
                f"{command[0]} ended with {done.returncode}, but should compile the "
                f"{source.what}: {first.removeprefix(place)} [{source.where}]"
            )
        keep(target, made.read_bytes())
