"""The few calls of the CUDA driver that running PTX text needs, in torch's own context."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.part import Broken, Skipped

JIT_ERROR_LOG_BUFFER, JIT_ERROR_LOG_SIZE = 5, 6
LOG_BYTES = 8192
THREADS = 256


class Loaded:
    """A PTX module, compiled and loaded by the driver.

    Raises:
        Skipped: no driver library.
        Broken: the driver refuses the text; its own words are quoted.
    """

    def __init__(self, text: str) -> None:
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Skipped(f"the CUDA driver library cannot be loaded: {error}") from error
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
            raise Broken(f"the driver refuses the PTX (status {status}): {said[:500]}")

    def launch(self, entry: str, buffers: Sequence[Tensor | None], count: int) -> None:
        """Run one kernel over `count` elements and wait for it.

        Args:
            entry: name of the kernel.
            buffers: tensors on the GPU whose addresses are its parameters; None passes 0.
            count: its last parameter.
        """
        function = ctypes.c_void_p()
        status = self._driver.cuModuleGetFunction(
            ctypes.byref(function), self._module, entry.encode()
        )
        numbers = [0 if buffer is None else buffer.data_ptr() for buffer in buffers]
        arguments = [ctypes.c_uint64(number) for number in [*numbers, count]]
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        grid = -(-count // THREADS)
        status = status or self._driver.cuLaunchKernel(
            function, grid, 1, 1, THREADS, 1, 1, 0, stream, pointers, None
        )
        if status:
            raise Broken(f"launching {entry} ended with status {status}")
        torch.cuda.synchronize()
