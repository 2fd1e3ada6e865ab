"""Executes one compiled Triton kernel: arguments to parameters, PTX from Triton's cache."""

from __future__ import annotations

import inspect
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import torch
from triton.runtime.cache import get_cache_manager

from twinstep.replay.errors import CannotReplay, ReplayError, UnsupportedArgument
from twinstep.replay.launch.options import Labelled
from twinstep.replay.launch.record import launching, recording
from twinstep.replay.launch.run import Request, pack, program_of, run
from twinstep.replay.machine.named import NamedBytes
from twinstep.replay.machine.program import Program
from twinstep.replay.ptx.relocate import relocate
from twinstep.replay.triton.torch_cuda import refuse_host

WARP = 32


class Metadata(Protocol):
    """The part of Triton's kernel metadata that replay needs."""

    hash: str
    name: str
    num_warps: int
    num_ctas: int
    shared: int
    global_scratch_size: int


class Source(Protocol):
    """The part of Triton's kernel source that replay needs."""

    name: str
    signature: dict[str, object]


Signature = str | tuple["Signature", ...]


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
            raise CannotReplay(
                f"Kernel {src.name} runs in clusters of {metadata.num_ctas} blocks, a limit of "
                f"replay and no fault of the kernel.",
                "cluster",
            )

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
            # Replay itself finds CPU tensors, whatever GPU is modelled for the launcher.
            with torch._C.DisableTorchFunction(), launching(self.source_name):
                self._execute(self.program, (int(grid_x), int(grid_y), int(grid_z)), args)
        if leave is not None:
            leave(launch_metadata)

    def _execute(
        self, program: Program, grid: tuple[int, int, int], args: Sequence[object]
    ) -> None:
        tensors: list[Labelled] = []
        values: list[int | bytes] = []
        for (name, kind), value in zip(self.signature.items(), args, strict=True):
            _flatten(name, kind, value, tensors, values)
        scratch = max(self.metadata.global_scratch_size, 0)
        if scratch:
            memory = torch.zeros(grid[0] * grid[1] * grid[2] * scratch + 128, dtype=torch.uint8)
            tensors.append(("global scratch", memory))
            values.append(-(-memory.data_ptr() // 128) * 128)
        # Triton appends pointers to scratch memory, which are null where none is needed.
        values += [0] * (len(program.kernel.params) - len(values))
        params, named = pack(program, values)
        run(
            Request(
                program,
                self.digest,
                grid,
                (self.metadata.num_warps * WARP, 1, 1),
                params,
                tensors,
                self.metadata.shared,
                counted=recording(),
                named=named,
            )
        )


def _ptx(src: Source, metadata: Metadata) -> str:
    """The PTX that Triton left in its cache beside the binary, with this kernel's own paths."""
    path = get_cache_manager(metadata.hash).get_file(f"{src.name[:150]}.ptx")
    if path is None:
        raise ReplayError(
            f"Triton kept no PTX of {src.name}: unset TRITON_STORE_BINARY_ONLY and clear its cache."
        )
    text = Path(path).read_text()
    function = getattr(getattr(src, "fn", None), "fn", None)
    return relocate(text, inspect.getsourcefile(function) or "") if function else text


def _flatten(
    name: str, kind: Signature, value: object, tensors: list[Labelled], values: list[int | bytes]
) -> None:
    """Append one argument's parameter values; tuples one by one, compile-time ones not at all.

    Raises:
        UnsupportedArgument: of a kind that replay cannot pass.
        ReplayError: the value is not of that kind.
    """
    if isinstance(kind, tuple):
        for index, (inner, item) in enumerate(
            zip(kind, cast(tuple[object, ...], value), strict=True)
        ):
            _flatten(f"{name}[{index}]", inner, item, tensors, values)
    elif kind.startswith("*"):
        values.append(_pointer(name, value, tensors))
    elif kind in ("fp16", "bf16", "fp32", "f32", "fp64"):
        kind = kind.replace("fp", "f")
        data = _float(name, kind, float(cast(float, value)))
        values.append(NamedBytes.of(data, kind, value))
    elif integer := re.fullmatch(r"([iu])(\d+)", kind):
        values.append(_integer(name, integer[1] == "i", int(integer[2]), int(cast(int, value))))
    elif kind != "constexpr":
        descriptor = kind.startswith(("tensordesc", "nvTmaDesc"))
        construct = "tensor descriptor" if descriptor else kind
        raise _unsupported(f"Argument {name} is of kind {kind}", construct)


def _float(name: str, kind: str, value: float) -> bytes:
    """The bytes of a float, as Triton's launcher makes them: to bf16 it cuts the low bits off."""
    if kind == "f64":
        return struct.pack("<d", value)
    if kind == "f16":
        try:
            return struct.pack("<e", value)
        except OverflowError:
            raise ReplayError(f"Argument {name} is {value}, which is too large for fp16.") from None
    with np.errstate(over="ignore"):
        single = np.array(value, np.float32).tobytes()
    return single[2:] if kind == "bf16" else single


def _integer(name: str, signed: bool, bits: int, value: int) -> bytes:
    """The bytes of an integer, as Triton's launcher makes them: the low ones of 64 bits."""
    if not (-(2**63) <= value < 2**63 if signed else 0 <= value < 2**64):
        raise ReplayError(f"Argument {name} is {value}, which Triton does not take for i{bits}.")
    size = max(bits, 8) // 8
    return (value % 2**64).to_bytes(8, "little")[:size]


def _unsupported(what: str, construct: str) -> UnsupportedArgument:
    return UnsupportedArgument(f"{what}, a limit of replay and no fault of the kernel.", construct)


def _pointer(name: str, value: object, tensors: list[Labelled]) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value
    base = getattr(value, "base", value)  # a reinterpreted tensor wraps the real one
    if isinstance(value, torch.Tensor):
        base = value
    if not isinstance(base, torch.Tensor):
        what = type(value).__name__
        raise _unsupported(f"Argument {name} is a {what}, where replay takes tensors", what)
    if base.device.type != "cpu":
        raise ReplayError(
            f"Argument {name} is on {base.device}, but replay runs on CPU tensors: move it, or "
            f"call twinstep.replay.deactivate() to use the GPU."
        )
    refuse_host(name, base)
    tensors.append((name, base))
    return base.data_ptr()
