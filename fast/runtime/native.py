"""Kernels in C++ for tensors on the CPU: built at first use, kept, and launched in Triton's place.

Each kernel under `@triton.jit` that a launcher starts has a native one in `fast/kernels/cpu/`: a
function of the same name and arguments, which ends with the number of programs and that of threads.
A build takes a few seconds and no headers but the language's own (`fast.runtime.building`). The
instruction set is the one that torch uses here (`ATEN_CPU_CAPABILITY` chooses another); all of
them have the same bits.
"""

import ctypes
import platform
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

import torch
import triton.language as tl
from torch import Tensor

from twinstep.fast.runtime import building
from twinstep.fast.runtime.compiled import Jitted

FLAGS = (
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-pthread"),
    # Every rounding that is written, and no other.
    *("-ffp-contract=off", "-fno-fast-math", "-fno-math-errno", "-fno-trapping-math"),
)
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
INSTRUCTION_SETS = {"DEFAULT": (), "AVX2": AVX2, "AVX512": AVX512}
SOURCES, MAIN = "twinstep.fast.kernels.cpu", "kernels.cpp"
# As the sources number them.
NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int16: 3}
CHOICES: dict[object, int] = {
    **{tl.float32: 0, tl.float16: 1, tl.bfloat16: 2, tl.int16: 3, tl.int32: 4},
    **{"inf": 0, "1": 1, "2": 2},
    **{"static": 0, "dynamic": 1, "wrapper": 2, "torch": 3},
}
# Tensors of a flat kernel that may be of several dtypes.
TYPED = ("param", "grads", "exp_avgs", "copies", "accumulators", "sources")


@cache
def library() -> ctypes.CDLL:
    """The kernels for this machine, built if they have not been.

    Raises:
        RuntimeError: there is no compiler, or it fails, or nothing can be written, or loaded.
    """
    path = built(INSTRUCTION_SETS[instruction_set()])
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # where no file may be executed
        raise RuntimeError(
            f"the CPU kernels cannot be loaded: {error} [fast.kernels.cpu]"
        ) from error


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
    where = SOURCES.removeprefix("twinstep.")
    source = building.Source(
        name="kernels", what="CPU kernels", where=where, main=MAIN, files=sources()
    )
    return building.built(source, [*FLAGS, *instructions])


def sources() -> dict[str, str]:
    """Text of every source file by name."""
    files = resources.files(SOURCES).iterdir()
    return {file.name: file.read_text() for file in files if file.name.endswith((".cpp", ".h"))}


def launch(
    kernel: Jitted, programs: int, args: Sequence[object], options: Mapping[str, object]
) -> tuple[Callable[..., object], tuple[object, ...]]:
    """Run the native kernel of the same name, on as many threads as torch would use.

    Args:
        kernel: under `@triton.jit`.
        programs: of Triton's launch, at least one.
        args: everything but the constants, by position.
        options: constants by name.

    Returns:
        What was called, and with what: first the arguments.

    Raises:
        RuntimeError: there is no compiler, or no native kernel. Nothing has been written.
    """
    function, typed, constants = _function(library(), cast(Any, kernel), len(args))
    words: list[object] = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
    words += [NUMBERS[args[place].dtype] for place in typed]  # type: ignore[attr-defined]
    words += [_number(options[name]) for name in constants]
    given = (*words, programs, torch.get_num_threads())
    function(*given)
    return function, given


def _number(value: object) -> int:
    """A constant as the sources take it."""
    return value if isinstance(value, int) else CHOICES[value]


@cache
def _function(loaded: ctypes.CDLL, kernel: Any, count: int) -> tuple[Any, list[int], list[str]]:
    """The function of a kernel with `count` arguments, places of dtypes it needs, its constants."""
    given, constants = kernel.arg_names[:count], kernel.arg_names[count:]
    function = getattr(loaded, kernel.__name__, None)
    if function is None:
        raise RuntimeError(f"{kernel.__name__} has no native kernel [fast.kernels.cpu]")
    typed = [place for place, name in enumerate(given) if name in TYPED]
    function.argtypes = [ctypes.c_int64] * (count + len(typed) + len(constants) + 2)
    function.restype = None
    return function, typed, constants


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
