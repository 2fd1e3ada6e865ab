"""Machine instructions that kernels on the CPU execute, counted one by one on one thread.

Counted is what runs below functions of libraries that belong neither to Python nor to the system:
kernels in C++, of ours or of a user, and all that they call. The count depends on compiler and
instruction set, so both sides of a comparison are counted on one machine.
"""

from __future__ import annotations

import ctypes
import gc
import platform
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch

from twinstep.benchmarks.beside.subject import Shape, arguments_of
from twinstep.fast.runtime.building import Source, built
from twinstep.parity.operations.operation import LAYOUTS
from twinstep.parity.registry.kernels import Kernel

FACT = "machine instructions executed"  # `growth` has its slack under this name
SHAPES = {LAYOUTS[0]: Shape(1, 1 << 12), LAYOUTS[1]: Shape(4, 1 << 10)}
WARM_UP = 2
FILE = Path(__file__).with_suffix(".cpp")
MAPS = Path("/proc/self/maps")


def of_kernel(kernel: Kernel, dtype: str, layout: str) -> dict[str, float]:
    """Instructions of one call in C++ of its own; nothing where it has none.

    Raises:
        RuntimeError: there is no compiler, or the machine is not an x86-64 under Linux.
    """
    given = arguments_of(kernel.operation, dtype, SHAPES[layout], torch.device("cpu"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what other threads execute is not seen
    try:
        for _ in range(WARM_UP):
            given.restore()
            given.call(kernel)
        given.restore()
        if not list(libraries()):
            return {}
        return {FACT: instructions(lambda: given.call(kernel))}
    finally:
        torch.set_num_threads(threads)


def instructions(call: Callable[[], object]) -> int:
    """Instructions that a call executes in this thread, in libraries of its own.

    Raises:
        RuntimeError: see `of_kernel`.
    """
    loaded = library()
    for begin, end in libraries():
        if not loaded.stepping_range(begin, end):
            raise RuntimeError("too many libraries are loaded to tell whose instructions are whose")
    gc.disable()
    loaded.stepping_begin()
    try:
        call()
    finally:
        found = int(loaded.stepping_end())
        gc.enable()
    return found


@cache
def library() -> ctypes.PyDLL:
    """The counter, built at first use; Python keeps its lock, so no other thread runs.

    Raises:
        RuntimeError: see `of_kernel`.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise RuntimeError("machine instructions of the CPU are counted on x86-64 under Linux only")
    files = {FILE.name: FILE.read_text()}
    source = Source(
        name="stepping", what="counter", where="parity bench gate", main=FILE.name, files=files
    )
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC"]
    found = ctypes.PyDLL(str(built(source, flags)))
    found.stepping_range.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    found.stepping_end.restype = ctypes.c_uint64
    return found


def libraries() -> Iterator[tuple[int, int]]:
    """Executable memory of libraries that are neither Python's nor the system's nor the counter."""
    prefixes = (sys.prefix, sys.base_prefix, str(Path(torch.__file__).parents[1]))
    foreign = (*(f"{folder}/" for folder in prefixes), "/usr/", "/lib")
    for line in MAPS.read_text().splitlines():
        words = line.split(maxsplit=5)
        path = words[5] if len(words) == 6 else ""
        own = path.startswith("/") and not path.startswith(foreign)
        if own and "x" in words[1] and not Path(path).name.startswith("stepping-"):
            begin, end = words[0].split("-")
            yield int(begin, 16), int(end, 16)
