"""CUDA C++ to PTX through NVIDIA's runtime compiler, which needs neither a GPU nor a driver.

    kernel = replay.cuda_kernel(source, "saxpy")
    kernel((4,), (256,), 2.0, x, y, n)

Needs the packages `cuda-bindings` and `nvidia-cuda-nvrtc` (the extra `cuda` of this project).
Headers such as `cuda_fp16.h` are taken from the Triton that is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import cast

import torch

from twinstep.replay.errors import CannotReplay, ReplayError
from twinstep.replay.launch.record import Launch, launching
from twinstep.replay.launch.run import run_ptx
from twinstep.replay.triton.torch_cuda import refuse_host

DEFAULT_TARGET = "compute_90"


@dataclass(frozen=True)
class CudaKernel:
    """A compiled CUDA C++ kernel that runs on CPU tensors.

    Attributes:
        name: Its entry.
        ptx: What the compiler made of it.
    """

    name: str
    ptx: str

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        *args: torch.Tensor | int | float | bytes,
        shared: int = 0,
    ) -> Launch:
        """Launch it; arguments as in `run_ptx`."""
        for index, tensor in enumerate(args):
            if isinstance(tensor, torch.Tensor):
                refuse_host(f"{index} of {self.name}", tensor)
        with torch._C.DisableTorchFunction():
            return run_ptx(self.ptx, self.name, grid, block, args, shared=shared)


def cuda_kernel(
    source: str,
    name: str,
    *,
    target: str = DEFAULT_TARGET,
    options: Sequence[str] = (),
) -> CudaKernel:
    """Compile CUDA C++ and give one of its `extern "C"` kernels as a function.

    Args:
        source: CUDA C++.
        name: The kernel.
        target: Virtual architecture, for instance "compute_90".
        options: Further options of NVRTC, for instance "--fmad=false".

    Raises:
        CannotReplay: if NVRTC is missing.
        ReplayError: if it refuses the source.
        UnknownInstruction: at the first launch, for an instruction that replay does not know.
    """
    with launching(name):
        text = compile_ptx(source, name=f"{name}.cu", target=target, options=options)
    return CudaKernel(name, text)


def missing() -> str:
    """Reason why CUDA C++ cannot be compiled here, in one sentence; "" where it can be."""
    try:
        _library().nvrtcVersion()
    except ModuleNotFoundError:
        return (
            "NVRTC is not installed: install cuda-bindings and nvidia-cuda-nvrtc, the extra "
            '"cuda" of this project.'
        )
    except Exception as error:  # the loader's own error type depends on its version
        return f"NVRTC cannot be loaded: {str(error).splitlines()[0].rstrip('.')}."
    return ""


def version() -> str:
    """Major and minor version of the compiler."""
    _, major, minor = _library().nvrtcVersion()
    return f"{major}.{minor}"


def compile_ptx(source: str, *, name: str, target: str, options: Sequence[str] = ()) -> str:
    """PTX of a CUDA C++ source.

    Raises:
        CannotReplay: if NVRTC is missing.
        ReplayError: with the first line of the compiler's complaint.
    """
    if reason := missing():
        raise CannotReplay(reason, "NVRTC")
    library = _library()
    wanted = [f"--gpu-architecture={target}", "--std=c++17", *_include(), *options]
    _, program = library.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], [])
    try:
        encoded = [option.encode() for option in wanted]
        (status,) = library.nvrtcCompileProgram(program, len(encoded), encoded)
        if status:
            _, size = library.nvrtcGetProgramLogSize(program)
            log = bytearray(size)
            library.nvrtcGetProgramLog(program, cast(bytes, log))
            complaint = bytes(log).rstrip(b"\0").decode().strip().splitlines() or [str(status)]
            raise ReplayError(f"NVRTC refuses {name}: {complaint[0]}")
        _, size = library.nvrtcGetPTXSize(program)
        text = bytearray(size)
        library.nvrtcGetPTX(program, cast(bytes, text))
        return bytes(text).rstrip(b"\0").decode()
    finally:
        library.nvrtcDestroyProgram(program)


@cache
def _library() -> ModuleType:
    from importlib import import_module

    return import_module("cuda.bindings.nvrtc")


def _include() -> list[str]:
    """The folder of CUDA headers that comes with Triton."""
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        return []
    return [f"--include-path={Path(spec.origin).parent / 'backends/nvidia/include'}"]
