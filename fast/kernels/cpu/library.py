"""The compiled kernels: built by the system's C++ compiler at first use, and kept.

A build takes about two seconds and no headers but the language's own. It is kept in the user's
cache folder under a digest of source, flags and compiler; processes that need it at once wait for
the first. The instruction set is the one that torch uses here (`ATEN_CPU_CAPABILITY` chooses
another); all of them have the same bits.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

FLAGS = (
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-pthread"),
    # Every rounding that is written, and no other.
    *("-ffp-contract=off", "-fno-fast-math", "-fno-math-errno", "-fno-trapping-math"),
)
AVX2 = ("-mavx2",)
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
INSTRUCTION_SETS = {"DEFAULT": (), "AVX2": AVX2, "AVX512": AVX512}
COMPILERS = ("c++", "g++", "clang++")
NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int16: 3}  # in the source
SECONDS = 120  # for a build


@cache
def library() -> ctypes.CDLL:
    """The kernels for this machine, built if they have not been.

    Raises:
        RuntimeError: there is no compiler, or it fails, or nothing can be written.
    """
    return ctypes.CDLL(str(built(INSTRUCTION_SETS[instruction_set()])))


def instruction_set() -> str:
    """Name of the widest instruction set that kernels use here."""
    found = torch.backends.cpu.get_cpu_capability()
    return found if platform.machine() == "x86_64" and found in INSTRUCTION_SETS else "DEFAULT"


def built(instructions: Sequence[str]) -> Path:
    """The library for some instruction set; compiled unless the cache has it.

    Args:
        instructions: flags of the compiler.

    Raises:
        RuntimeError: see `library`.
    """
    compiler = _compiler()
    source = (resources.files(__package__) / "kernels.cpp").read_bytes()
    facts = Path(compiler).resolve()
    known = [*FLAGS, *instructions, str(facts), str(facts.stat().st_mtime_ns), platform.machine()]
    digest = hashlib.sha256(source + "\0".join(known).encode()).hexdigest()[:16]
    try:
        folder = _folder()
        target = folder / f"kernels-{digest}.so"
        if not target.exists():
            with (folder / f"kernels-{digest}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not target.exists():
                    _compile([compiler, *FLAGS, *instructions], source, target)
    except OSError as error:
        raise RuntimeError(
            f"the CPU kernels cannot be built: {error} [fast.kernels.cpu]"
        ) from error
    return target


def _compiler() -> str:
    """The user's CXX, or the first compiler that there is."""
    wanted = os.environ.get("CXX", "")
    names = (wanted,) if wanted else COMPILERS
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return found
    raise RuntimeError(
        f"there is no C++ compiler ({', '.join(names)}), but CPU kernels are compiled at first "
        "use: install g++ or clang++, or name one in CXX [fast.kernels.cpu]"
    )


def _folder() -> Path:
    """The user's cache folder of this package, made if it is not there."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "twinstep"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _compile(command: Sequence[str], source: bytes, target: Path) -> None:
    """Compile beside the target, and move it there whole."""
    with tempfile.TemporaryDirectory(dir=target.parent) as place:
        code, made = Path(place) / "kernels.cpp", Path(place) / target.name
        code.write_bytes(source)
        call = [*command, str(code), "-o", str(made)]
        done = subprocess.run(call, capture_output=True, text=True, timeout=SECONDS, check=False)
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), "")
            raise RuntimeError(
                f"{command[0]} ended with {done.returncode}, but should compile the CPU kernels: "
                f"{first.removeprefix(place)} [fast.kernels.cpu]"
            )
        os.replace(made, target)


def call(name: str, rows: Iterable[Sequence[int]], *arguments: object) -> None:
    """Call a kernel on as many threads as torch would use; other Python threads go on meanwhile.

    Args:
        name: of the function.
        rows: one for each tensor that has elements: addresses, sizes and dtypes.
        arguments: ctypes values.
    """
    given = [*rows]
    table = array("q", [word for row in given for word in row])
    threads = ctypes.c_int64(torch.get_num_threads())
    address = ctypes.c_void_p(table.buffer_info()[0])
    library()[name](address, ctypes.c_int64(len(given)), *arguments, threads)


def require_cpu(where: str, near: Tensor) -> None:
    """Require a tensor in the memory of the CPU.

    Raises:
        RuntimeError: it is elsewhere.
    """
    if near.device.type != "cpu":
        raise RuntimeError(f"tensors are on {near.device}, but should be on the CPU [{where}]")
