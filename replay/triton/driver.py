"""Triton's way in: a driver that keeps the PTX of a compiled kernel and executes it on the CPU.

It reports an sm_90 target, so that Triton compiles exactly what a GPU would get, and a device
index of its own, so that kernels compiled for replay and for a real GPU never mix.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from twinstep.replay.checks.streams import STREAM
from twinstep.replay.errors import ReplayError, UnsupportedTriton
from twinstep.replay.launch.options import TUNING, register_buffer_provider
from twinstep.replay.launch.record import launching
from twinstep.replay.launch.run import require_subnormals, run_ptx
from twinstep.replay.triton.cubin import resources
from twinstep.replay.triton.device import DEVICE, INDEX
from twinstep.replay.triton.gpu import CAPABILITY, GPU, INTERFACE
from twinstep.replay.triton.launcher import WARP, Launcher
from twinstep.replay.triton.torch_cuda import CPU, modelled, modelled_gpu, refuse_host

TESTED = ((3, 6), (3, 9))
"""Oldest and newest Triton that replay was tested with."""


def check_version(version: str) -> None:
    """Refuse a Triton that replay was not tested with.

    Raises:
        UnsupportedTriton: naming the version, the range and the remedies.
    """
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if not TESTED[0] <= numbers <= TESTED[1]:
        oldest, newest = (".".join(map(str, v)) for v in TESTED)
        raise UnsupportedTriton(
            f"Triton is {version}, but replay was tested with {oldest} to {newest}: install one "
            f"of these, or run on a GPU."
        )


def _restores(call: Callable[[], object]) -> bool:
    """True if the autotuner that made this closure puts its arguments back after every run."""
    held = [cell.cell_contents for cell in getattr(call, "__closure__", None) or ()]
    hooks = ("restore_value", "reset_to_zero", "user_defined_pre_hook", "user_defined_post_hook")
    return any(getattr(owner, hook, None) for owner in held for hook in hooks)


_NOTHING_LOADED = object()
"""The module of every kernel that replay runs."""


def _leave_modules_of_replay() -> None:
    """Keep Triton from unloading them: 3.9 looks for a driver to do it, perhaps in vain."""
    unload = getattr(CompiledKernel, "__del__", None)
    if unload is None:
        return

    def collected(self: CompiledKernel) -> None:
        if self.module is not _NOTHING_LOADED:
            unload(self)

    CompiledKernel.__del__ = collected


_leave_modules_of_replay()


class _Utils:
    """The part of a Triton driver's utilities that compiled kernels ask for."""

    def load_binary(
        self, name: str, kernel: bytes, shared: int, device: int
    ) -> tuple[object, int, int, int, int]:
        """Module, function, registers, words of local memory, most threads: nothing is loaded."""
        registers, local = resources(kernel, name)
        return _NOTHING_LOADED, 1, registers, local // 4, 1024

    def unload_module(self, module: object) -> None:
        """There is nothing to unload."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Properties of the reported target."""
        return {
            "max_shared_mem": GPU.shared_memory_per_block_optin,
            "max_num_regs": GPU.regs_per_multiprocessor,
            "multiprocessor_count": GPU.multi_processor_count,
            "warpSize": WARP,
            "sm_clock_rate": 1,
            "mem_clock_rate": 1,
            "mem_bus_width": 1,
        }


class ReplayDriver:
    """The driver that `triton.runtime.driver.set_active` takes.

    Attributes:
        executes_cpu_tensors: Marks, for launchers, that CPU tensors may be passed.
        register_buffer_provider: For launchers that pass addresses in tables, see there.
    """

    executes_cpu_tensors = True
    register_buffer_provider = staticmethod(register_buffer_provider)

    @staticmethod
    def run_ptx(
        ptx: str,
        kernel: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[torch.Tensor | int | float | bytes],
    ) -> None:
        """Run a kernel from another compiler than Triton's; arguments as in `launch.run_ptx`."""
        for index, arg in enumerate(args):
            if isinstance(arg, torch.Tensor):
                refuse_host(f"{index} of {kernel}", arg)
        with torch._C.DisableTorchFunction():
            run_ptx(ptx, kernel, grid, block, args)

    def __init__(self) -> None:
        self.utils = _Utils()
        self.launcher_cls = Launcher

    @classmethod
    def is_active(cls) -> bool:
        """Never chosen by Triton on its own."""
        return False

    def get_current_target(self) -> GPUTarget:
        """The target that kernels are compiled for."""
        return GPUTarget("cuda", 90, WARP)

    def get_current_device(self) -> int:
        """The device index of replay."""
        return INDEX

    def set_current_device(self, device: int) -> None:
        """There is one device."""

    def get_current_stream(self, device: int) -> int:
        """Number of the current stream."""
        return STREAM.get()

    def get_device_capability(self, device: int = INDEX) -> tuple[int, int]:
        """Compute capability of the reported target."""
        return CAPABILITY

    def get_active_torch_device(self) -> torch.device:
        """The device of tensors."""
        return DEVICE if modelled() else CPU

    def get_device_interface(self) -> object:
        """Streams and events for measurements."""
        return INTERFACE

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Not needed: no launcher is compiled."""
        raise ReplayError(f"Replay compiles no launcher, so {ty} has no C++ type.")

    def assemble_tensormap_to_arg(self, info: object, args: object) -> object:
        """Tensor maps are not supported; arguments pass unchanged."""
        return args

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """For autotuning: the wall-clock time of one launch, in milliseconds."""

        def benchmark(
            call: Callable[[], object], *, quantiles: list[float], **_: object
        ) -> list[float]:
            token = TUNING.set(not _restores(call))
            started = perf_counter()
            try:
                call()
            finally:
                TUNING.reset(token)
            return [1000.0 * (perf_counter() - started)] * len(quantiles or [0.5])

        return benchmark

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        """A buffer that stands for the cache."""
        return torch.empty(1, dtype=torch.int32)

    def clear_cache(self, cache: torch.Tensor) -> None:
        """There is no cache to clear."""
        cache.zero_()


class _Activations(threading.local):
    """What this thread has activated and not deactivated, each with what is to be undone."""

    def __init__(self) -> None:
        self.open: list[ExitStack] = []


_TRITONS_RUN = JITFunction.run


@functools.wraps(_TRITONS_RUN)
def _run(kernel: JITFunction[Callable[..., object]], *args: object, **kwargs: object) -> object:
    """Triton's own, which compiles a kernel and launches it, with its faults on record."""
    with launching(kernel.fn.__name__):
        return _TRITONS_RUN(kernel, *args, **kwargs)


_LOCK = threading.Lock()
_OWN = _Activations()
_COUNT = 0
_PREVIOUS = ExitStack()
_DRIVER = ReplayDriver()
_FUSION = "TRITON_DEFAULT_FP_FUSION"


@contextmanager
def fusion_by_default() -> Iterator[None]:
    """The default of this Triton for `enable_fp_fusion`, said in the environment.

    Where nobody says it, Triton 3.9 warns that 3.10 will have another one.
    """
    if _FUSION in os.environ:
        yield
        return
    os.environ[_FUSION] = str(int(triton.knobs.language.default_fp_fusion))
    try:
        yield
    finally:
        os.environ.pop(_FUSION, None)


def activate(*, cuda: bool = False) -> None:
    """Make `kernel[grid](...)` execute compiled code on CPU tensors, in the whole process.

    Calls nest, in each thread and over all: as many calls of `deactivate` restore the driver that
    was active before, each in the thread that had called `activate`. Kernels that do not say
    `enable_fp_fusion` get what this Triton does by default.

    Args:
        cuda: Model a GPU for this thread as well, see `modelled_gpu`.

    Raises:
        UnsupportedTriton: if this Triton was not tested.
        ReplayError: if subnormals are flushed to zero.
    """
    global _COUNT
    check_version(triton.__version__)
    require_subnormals()
    undo = ExitStack()
    if cuda:
        undo.enter_context(modelled_gpu())
    with _LOCK:
        if not _COUNT:
            _PREVIOUS.callback(triton.runtime.driver.set_active, triton.runtime.driver._active)
            _PREVIOUS.enter_context(fusion_by_default())
            triton.runtime.driver.set_active(_DRIVER)
            _PREVIOUS.callback(setattr, JITFunction, "run", _TRITONS_RUN)
            JITFunction.run = _run
        _COUNT += 1
    _OWN.open.append(undo)


def deactivate() -> None:
    """Undo one `activate` of this thread; without one, do nothing."""
    global _COUNT
    if not _OWN.open:
        return
    undo = _OWN.open.pop()
    with _LOCK:
        _COUNT -= 1
        if not _COUNT:
            _PREVIOUS.close()
    undo.close()


def active() -> bool:
    """True if kernels launched now run on replay."""
    return bool(triton.runtime.driver._active is _DRIVER)
