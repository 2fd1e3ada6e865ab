"""Triton's way in: a driver that keeps the PTX of a compiled kernel and executes it on the CPU.

It reports an sm_90 target, so that Triton compiles exactly what a GPU would get, and a device
index of its own, so that kernels compiled for replay and for a real GPU never mix.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Protocol, cast

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager

from fast.tables import live_tensors
from parity.replay.errors import ReplayError, UnsupportedTriton
from parity.replay.launch import (
    Labelled,
    Request,
    pack,
    program_of,
    register_buffer_provider,
    run,
)
from parity.replay.translate import Program

TESTED = ((3, 6), (3, 9))
"""Oldest and newest Triton that replay was tested with."""

DEVICE = 1000
"""Device index of replay; no machine has a GPU of that number."""

WARP = 32
SHARED_MEMORY = 232448
"""Bytes of shared memory per block on the reported target."""


class Metadata(Protocol):
    """What replay needs of Triton's kernel metadata."""

    hash: str
    name: str
    num_warps: int
    num_ctas: int
    shared: int
    global_scratch_size: int


class Source(Protocol):
    """What replay needs of Triton's kernel source."""

    name: str
    signature: dict[str, object]


Signature = str | tuple["Signature", ...]


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


def check_subnormals() -> None:
    """Refuse to run in a thread that flushes subnormals to zero.

    Raises:
        ReplayError: if NumPy or torch loses 2^-149.
    """
    tiny = 2.0**-149
    by_numpy = np.full(1, tiny, np.float32) * np.ones(1, np.float32)
    by_torch = torch.full((1,), tiny) * torch.ones(1)
    if by_numpy[0] == 0 or by_torch.item() == 0:
        raise ReplayError(
            "Subnormal floats are flushed to zero in this thread, but replay needs them: do not "
            "call torch.set_flush_denormal(True), and do not import code built with fast-math."
        )


class Launcher:
    """Executes one compiled kernel; Triton makes it in place of its own launcher."""

    def __init__(self, src: Source, metadata: Metadata) -> None:
        self.signature: dict[str, Signature] = {
            name: cast(Signature, kind) for name, kind in src.signature.items()
        }
        self.metadata = metadata
        self.source_name = src.name
        self.ptx = _ptx(src, metadata)
        self.program: Program | None = None
        self.digest = ""
        if metadata.num_ctas != 1:
            raise ReplayError(f"Kernel {src.name} uses clusters of {metadata.num_ctas} blocks.")

    def __call__(
        self,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        stream: int,
        function: object,
        packed: object,
        launch_metadata: object,
        enter: Callable[[object], None] | None,
        leave: Callable[[object], None] | None,
        *args: object,
    ) -> None:
        """Launch over a grid. `args` are the kernel's arguments, compile-time ones included."""
        if self.program is None:
            self.program, self.digest = program_of(self.ptx, self.metadata.name)
        if enter is not None:
            enter(launch_metadata)
        if grid_x * grid_y * grid_z > 0:
            self._execute(self.program, (int(grid_x), int(grid_y), int(grid_z)), args)
        if leave is not None:
            leave(launch_metadata)

    def _execute(
        self, program: Program, grid: tuple[int, int, int], args: Sequence[object]
    ) -> None:
        tensors: list[Labelled] = []
        values: list[int | float] = []
        for (name, kind), value in zip(self.signature.items(), args, strict=True):
            _flatten(name, kind, value, tensors, values)
        scratch = max(self.metadata.global_scratch_size, 0)
        if scratch:
            memory = torch.zeros(grid[0] * grid[1] * grid[2] * scratch + 128, dtype=torch.uint8)
            tensors.append(("global scratch", memory))
            values.append(-(-memory.data_ptr() // 128) * 128)
        # Triton appends pointers to scratch memory, which are null where none is needed.
        values += [0] * (len(program.kernel.params) - len(values))
        run(
            Request(
                program,
                self.digest,
                grid,
                (self.metadata.num_warps * WARP, 1, 1),
                pack(program, values),
                tensors,
                self.metadata.shared,
            )
        )


def _ptx(src: Source, metadata: Metadata) -> str:
    """The PTX that Triton left in its cache beside the binary."""
    path = get_cache_manager(metadata.hash).get_file(f"{src.name[:150]}.ptx")
    if path is None:
        raise ReplayError(
            f"Triton kept no PTX of {src.name}: unset TRITON_STORE_BINARY_ONLY and clear its cache."
        )
    return Path(path).read_text()


def _flatten(
    name: str,
    kind: Signature,
    value: object,
    tensors: list[Labelled],
    values: list[int | float],
) -> None:
    """Append one argument's parameter values; tuples one by one, compile-time ones not at all."""
    if isinstance(kind, tuple):
        for index, (inner, item) in enumerate(
            zip(kind, cast(tuple[object, ...], value), strict=True)
        ):
            _flatten(f"{name}[{index}]", inner, item, tensors, values)
        return
    if kind == "constexpr":
        return
    if kind.startswith(("tensordesc", "nvTmaDesc")):
        raise ReplayError(f"Argument {name} is a tensor descriptor, which replay does not support.")
    if kind.startswith("*"):
        values.append(_pointer(name, value, tensors))
    elif kind[0] in "fb" and kind != "b1":
        values.append(_float_bits(kind, float(cast(float, value))))
    else:
        values.append(int(cast(int, value)))


def _pointer(name: str, value: object, tensors: list[Labelled]) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value
    base = getattr(value, "base", value)  # a reinterpreted tensor wraps the real one
    if isinstance(value, torch.Tensor):
        base = value
    if not isinstance(base, torch.Tensor):
        raise ReplayError(f"Argument {name} is a {type(value).__name__}, but should be a tensor.")
    if base.device.type != "cpu":
        raise ReplayError(
            f"Argument {name} is on {base.device}, but replay runs on CPU tensors: move it, or "
            f"call parity.replay.deactivate() to use the GPU."
        )
    tensors.append((name, base))
    return base.data_ptr()


def _float_bits(kind: str, value: float) -> int | float:
    """A float argument as its parameter holds it: bits, rounded once from the Python float."""
    if kind in ("bf16", "fp16"):
        dtype = torch.bfloat16 if kind == "bf16" else torch.float16
        return int(torch.tensor(value, dtype=dtype).view(torch.int16).item()) & 0xFFFF
    size = 8 if kind in ("fp64", "f64") else 4
    return int(np.array(value, f"f{size}").view(f"u{size}"))


class _Utils:
    """The part of a Triton driver's utilities that compiled kernels ask for."""

    def load_binary(
        self, name: str, kernel: bytes, shared: int, device: int
    ) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills, most threads: there is nothing to load."""
        return 1, 1, 0, 0, 1024

    def unload_module(self, module: int) -> None:
        """There is nothing to unload."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Properties of the reported target."""
        return {
            "max_shared_mem": SHARED_MEMORY,
            "max_num_regs": 65536,
            "multiprocessor_count": 132,
            "warpSize": WARP,
            "sm_clock_rate": 1,
            "mem_clock_rate": 1,
            "mem_bus_width": 1,
        }


class ReplayDriver:
    """What `triton.runtime.driver.set_active` takes.

    Attributes:
        executes_cpu_tensors: Marks, for launchers, that CPU tensors may be passed.
    """

    executes_cpu_tensors = True

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
        return DEVICE

    def set_current_device(self, device: int) -> None:
        """There is one device."""

    def get_current_stream(self, device: int) -> int:
        """There is one stream, and it is synchronous."""
        return 0

    def get_device_capability(self, device: int = DEVICE) -> tuple[int, int]:
        """Compute capability of the reported target."""
        return 9, 0

    def get_active_torch_device(self) -> torch.device:
        """Where tensors live."""
        return torch.device("cpu")

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
            started = perf_counter()
            call()
            return [1000.0 * (perf_counter() - started)] * len(quantiles or [0.5])

        return benchmark

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        """A buffer that stands for the cache."""
        return torch.empty(1, dtype=torch.int32)

    def clear_cache(self, cache: torch.Tensor) -> None:
        """There is no cache to clear."""
        cache.zero_()


register_buffer_provider(live_tensors)

_LOCK = threading.Lock()
_DEPTH = 0
_PREVIOUS: object = None
_DRIVER = ReplayDriver()


def activate() -> None:
    """Make `kernel[grid](...)` execute compiled code on CPU tensors, in the whole process.

    Calls nest: as many calls of `deactivate` restore the driver that was active before.

    Raises:
        UnsupportedTriton: if this Triton was not tested.
        ReplayError: if subnormals are flushed to zero.
    """
    global _DEPTH, _PREVIOUS
    check_version(triton.__version__)
    check_subnormals()
    with _LOCK:
        if _DEPTH == 0:
            _PREVIOUS = triton.runtime.driver._active
            triton.runtime.driver.set_active(_DRIVER)
        _DEPTH += 1


def deactivate() -> None:
    """Undo one `activate`; without one, do nothing."""
    global _DEPTH, _PREVIOUS
    with _LOCK:
        if _DEPTH == 0:
            return
        _DEPTH -= 1
        if _DEPTH == 0:
            triton.runtime.driver.set_active(_PREVIOUS)
            _PREVIOUS = None


def active() -> bool:
    """Whether kernels launched now run on replay."""
    return bool(triton.runtime.driver._active is _DRIVER)
