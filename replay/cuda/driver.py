"""The few calls of the CUDA driver that running PTX text on a GPU needs, in torch's own context."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from twinstep.replay.errors import ReplayError

JIT_ERROR_LOG_BUFFER, JIT_ERROR_LOG_SIZE = 5, 6
LOG_BYTES = 8192

Argument = Tensor | int | bytes


class NoDriver(ReplayError):
    """The CUDA driver library cannot be loaded."""


class RefusedByDriver(ReplayError):
    """The driver does not compile or launch what it was given; its own words are quoted."""


class Loaded:
    """A PTX module, compiled and loaded by the driver.

    Raises:
        NoDriver: there is no driver library.
        RefusedByDriver: it does not take the text.
    """

    def __init__(self, text: str) -> None:
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NoDriver(f"the CUDA driver library cannot be loaded: {error}") from error
        # Torch makes its context current in this thread when it first allocates.
        torch.empty(1, device="cuda")
        self._module = ctypes.c_void_p()
        log = ctypes.create_string_buffer(LOG_BYTES)
        options = (ctypes.c_int * 2)(JIT_ERROR_LOG_BUFFER, JIT_ERROR_LOG_SIZE)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), LOG_BYTES)
        status = self._driver.cuModuleLoadDataEx(
            ctypes.byref(self._module), text.encode(), 2, options, values
        )
        if status:
            said = log.value.decode(errors="replace").strip()
            raise RefusedByDriver(f"the driver refuses the PTX (status {status}): {said[:500]}")

    def launch(self, entry: str, grid: int, threads: int, arguments: Sequence[Argument]) -> None:
        """Run one kernel and wait for it.

        Args:
            entry: name of the kernel.
            grid: blocks.
            threads: threads in each.
            arguments: per parameter a tensor on the GPU (its address), a 64-bit number, or bytes.

        Raises:
            RefusedByDriver: there is no such kernel, or it does not start.
        """
        function = ctypes.c_void_p()
        status = self._driver.cuModuleGetFunction(
            ctypes.byref(function), self._module, entry.encode()
        )
        held = [_held(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = status or self._driver.cuLaunchKernel(
            function, grid, 1, 1, threads, 1, 1, 0, stream, pointers, None
        )
        if status:
            raise RefusedByDriver(f"launching {entry} ended with status {status}")
        torch.cuda.synchronize()

    def unload(self) -> None:
        """Give the module back."""
        self._driver.cuModuleUnload(self._module)


def _held(argument: Argument) -> ctypes.c_uint64 | ctypes.Array[ctypes.c_char]:
    if isinstance(argument, bytes):
        return ctypes.create_string_buffer(argument, len(argument))
    return ctypes.c_uint64(argument.data_ptr() if isinstance(argument, Tensor) else argument)
