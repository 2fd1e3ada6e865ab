"""The CUDA C++ kernels: compiled by NVRTC at first use, kept, and launched on torch's stream.

A variant is a source with the dtypes and options of its macros. It takes half a second to compile,
needs neither a toolkit nor a GPU, and is kept in the user's cache folder under a digest of sources,
options and compiler. Machine code runs on the GPU; where a Triton driver that executes kernels on
CPU tensors is active, that driver takes the PTX.
"""

import ctypes
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor

from twinstep.fast.runtime.cache_folder import cache_folder, keep, kept
from twinstep.fast.runtime.dispatch import executes_cpu_tensors, require_engine
from twinstep.fast.runtime.tables import TensorLists, live_tensors, reachable
from twinstep.fast.runtime.uploads import on_device

HEADERS = ("common.h", "exact_sum.h")
FLAGS = (
    *("--std=c++17", "--generate-line-info"),
    # Every rounding that is written, and no other.
    *("--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false"),
)
Macros = tuple[tuple[str, int], ...]
# Hears of each launch: source, kernel, threads, macros. Where it answers True, nothing is launched.
listener: Callable[[str, str, int, Macros], bool] | None = None
NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int16: 3}  # in the sources


def launch(
    source: str,
    kernel: str,
    programs: int,
    threads: int,
    near: Tensor,
    args: Sequence[Tensor | int],
    macros: Mapping[str, int],
    *,
    reaches: TensorLists = (),
) -> None:
    """Launch a kernel of `programs` blocks on the device of `near`; zero blocks: nothing.

    Args:
        source: the file without its ending.
        kernel: its entry.
        programs: blocks.
        threads: of a block.
        near: a tensor on the device where the kernel is to run.
        args: tensors for pointers, numbers of 64 bits.
        macros: dtypes and options that the source is compiled with.
        reaches: tensors that the kernel finds through a pointer table among its arguments.

    Raises:
        RuntimeError: nothing here can run kernels on that device, NVRTC is not installed, or the
            driver refuses. Nothing was launched.
    """
    require_engine(near.device, kernel)
    if programs == 0:
        return
    chosen = tuple(sorted(macros.items()))
    if listener is not None and listener(source, kernel, threads, chosen):
        return
    with on_device(near.device), reachable(reaches):
        if executes_cpu_tensors():
            driver = triton.runtime.driver.active
            driver.register_buffer_provider(live_tensors)
            ptx = compiled(source, "ptx", 90, chosen).decode()
            driver.run_ptx(ptx, kernel, (programs,), (threads,), args)
            return
        function = _loaded(source, kernel, near.device, chosen)
        values = tuple(arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args)
        types = (ctypes.c_uint64,) * len(values)
        stream = torch.cuda.current_stream(near.device).cuda_stream
        shape = (programs, 1, 1, threads, 1, 1)
        _answer(_cuda().cuLaunchKernel(function, *shape, 0, stream, (values, types), 0))


def resident(
    source: str, kernel: str, threads: int, near: Tensor, macros: Mapping[str, int]
) -> int:
    """Blocks that the device holds at once; 8 where kernels run on CPU tensors."""
    if executes_cpu_tensors():
        return 8
    function = _loaded(source, kernel, near.device, tuple(sorted(macros.items())))
    (each,) = _answer(_cuda().cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, 0))
    return int(each) * torch.cuda.get_device_properties(near.device).multi_processor_count


@cache
def compiled(source: str, kind: str, target: int, macros: Macros) -> bytes:
    """Machine code or PTX of a variant.

    Args:
        source: the file without its ending.
        kind: "cubin" or "ptx".
        target: compute capability without its point: 90 for 9.0.
        macros: names and values.

    Raises:
        RuntimeError: NVRTC is not installed, or refuses the source.
    """
    compiler = _nvrtc()
    files = files_of(source)
    options = [f"--gpu-architecture=sm_{target}", *FLAGS, *(f"-D{n}={v}" for n, v in macros)]
    facts = "\0".join([kind, version(), *options, *files.values()])
    path = cache_folder() / f"{source}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.{kind}"
    code = kept(path)
    if code is None:
        code = _compile(compiler, f"{source}.cu", files, options, kind)
        keep(path, code)
    return code


def version() -> str:
    """Name and version of the compiler.

    Raises:
        RuntimeError: it is not installed.
    """
    major, minor = _nvrtc().nvrtcVersion()[1:]
    return f"nvrtc {major}.{minor}"


def files_of(source: str) -> dict[str, str]:
    """Text of a source and of all headers, by name."""
    return {name: _text(name) for name in (f"{source}.cu", *HEADERS)}


def _compile(
    compiler: ModuleType, name: str, files: dict[str, str], options: Sequence[str], kind: str
) -> bytes:
    headers = [files[header].encode() for header in HEADERS]
    names = [header.encode() for header in HEADERS]
    _, program = compiler.nvrtcCreateProgram(
        files[name].encode(), name.encode(), len(headers), headers, names
    )
    try:
        encoded = [option.encode() for option in options]
        (status,) = compiler.nvrtcCompileProgram(program, len(encoded), encoded)
        if status:
            _, size = compiler.nvrtcGetProgramLogSize(program)
            log = bytearray(size)
            compiler.nvrtcGetProgramLog(program, log)
            lines = bytes(log).rstrip(b"\0").decode().strip().splitlines() or [str(status)]
            raise RuntimeError(f"NVRTC refuses {name}: {lines[0]} [fast.kernels.cuda]")
        noun = {"ptx": "PTX", "cubin": "CUBIN"}[kind]
        _, size = getattr(compiler, f"nvrtcGet{noun}Size")(program)
        code = bytearray(size)
        getattr(compiler, f"nvrtcGet{noun}")(program, code)
        return bytes(code).rstrip(b"\0") if kind == "ptx" else bytes(code)
    finally:
        compiler.nvrtcDestroyProgram(program)


@cache
def _loaded(source: str, kernel: str, device: torch.device, macros: Macros) -> Any:
    """A kernel in the memory of a GPU; its module is kept for as long as the process lives."""
    major, minor = torch.cuda.get_device_capability(device)
    code = compiled(source, "cubin", 10 * major + minor, macros)
    torch.cuda.current_stream(device).cuda_stream  # noqa: B018  the device's context exists now
    (module,) = _answer(_cuda().cuModuleLoadData(code))
    (function,) = _answer(_cuda().cuModuleGetFunction(module, kernel.encode()))
    return function


def _answer(result: Any) -> Any:
    """What a call of the driver returns besides its status.

    Raises:
        RuntimeError: the status is an error.
    """
    status, *rest = result
    if status:
        raise RuntimeError(f"the CUDA driver answers {status.name} [fast.kernels.cuda]")
    return rest


@cache
def _nvrtc() -> ModuleType:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as error:  # the loader's own error type depends on its version
        raise RuntimeError(
            "kernels in CUDA C++ need cuda-bindings and nvidia-cuda-nvrtc: install the extra "
            f'"cuda" of this project ({str(error).splitlines()[0]}) [fast.kernels.cuda]'
        ) from error
    return nvrtc  # type: ignore[no-any-return]


def _cuda() -> ModuleType:
    from cuda.bindings import driver

    return driver  # type: ignore[no-any-return]


def _text(name: str) -> str:
    return (resources.files(__package__) / name).read_text()
