"""One launch from start to record: parameters, memory, batches of blocks, counters."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import prod
from time import perf_counter

import numpy as np
import torch

from twinstep.replay.checks.history import History
from twinstep.replay.checks.races import BatchChecks
from twinstep.replay.checks.streams import launched
from twinstep.replay.dtypes import NUMPY, Array, width
from twinstep.replay.errors import ReplayError
from twinstep.replay.launch.blocks import near_ends, parts, require_launchable
from twinstep.replay.launch.count import count_accesses, count_instructions
from twinstep.replay.launch.options import (
    OPTIONS,
    TRANSLATION,
    TUNING,
    Labelled,
    Options,
    reachable,
)
from twinstep.replay.launch.record import Launch, launching, publish
from twinstep.replay.launch.tables import listed
from twinstep.replay.machine.execute import Execution
from twinstep.replay.machine.lanes import Batch, Place
from twinstep.replay.machine.memory import Extents, Regions
from twinstep.replay.machine.named import HostNumber, NamedBytes, NamedFloat
from twinstep.replay.machine.program import Program
from twinstep.replay.machine.windows import Windows, address_loads, moved_parameters
from twinstep.replay.ptx.flow import decides, family
from twinstep.replay.ptx.parse import parse
from twinstep.replay.ptx.provenance import parameters_of_address
from twinstep.replay.ptx.syntax import Instruction, Mem, Variable
from twinstep.replay.translate.checked import checked
from twinstep.replay.translate.program import translate

LANES = 16384
"""Threads per batch: large enough to hide NumPy's overhead, small enough for the cache."""

PROCESSORS = 132
"""Multiprocessors of the reported target. So many blocks, one on each, run together at least where
a kernel waits for other blocks; that is what persistent kernels and grid barriers count on."""

SHARED_LIMIT = 64 << 20
"""Bytes of shared memory that one batch may take."""

_PROGRAMS: dict[tuple[str, str], Program] = {}
_LOCK = threading.Lock()
_SMALL = 2.0**-600


def program_of(ptx: str, kernel: str) -> tuple[Program, str]:
    """The translation of a kernel (made once) and the hash of its text."""
    digest = hashlib.sha256(ptx.encode()).hexdigest()
    with _LOCK:
        program = _PROGRAMS.get((digest, kernel))
        if program is None:
            program = _PROGRAMS[digest, kernel] = translate(parse(ptx), kernel)
    return program, digest


def require_subnormals() -> None:
    """Refuse to run in a thread that flushes subnormals to zero.

    Raises:
        ReplayError: if it does.
    """
    if _SMALL * (_SMALL * 2.0**140) == 0:
        raise ReplayError(
            "Subnormal floats are flushed to zero in this thread, but replay needs them: do not "
            "call torch.set_flush_denormal(True), and do not import code built with fast-math."
        )


def pack(
    program: Program, values: Sequence[int | float | bytes]
) -> tuple[bytes, dict[int, NamedBytes]]:
    """Parameter bytes from values in order of declaration, and those with names by their start.

    Raises:
        ReplayError: a value is not of its parameter's kind, or does not fit; nothing is converted.
    """
    params = program.kernel.params
    if len(values) != len(params):
        raise ReplayError(
            f"Kernel {program.kernel.name} has {len(params)} parameters, got {len(values)}."
        )
    data, named = bytearray(program.layout.param_size), {}
    for (variable, kind), value in zip(params, values, strict=True):
        start = program.layout.params[variable.name]
        try:
            own = _encoded(variable, kind, value)
        except ValueError as error:
            raise ReplayError(
                f"Parameter {variable.name} of kernel {program.kernel.name} {error}."
            ) from None
        data[start : start + variable.size] = own
        if isinstance(own, NamedBytes):
            named[start] = own
    return bytes(data), named


def _encoded(variable: Variable, kind: str, value: int | float | bytes) -> bytes:
    """The bytes of one parameter."""
    size = variable.size
    if isinstance(value, bytes):
        if len(value) != size:
            raise ValueError(f"has {size} bytes, got {len(value)}")
        return value
    if size != width(kind):
        raise ValueError(f"is a structure of {size} bytes, got {value!r}: pass bytes")
    if isinstance(value, float):
        if kind not in ("f32", "f64", "b32", "b64"):
            raise ValueError(f"is of type .{kind}, got {value!r}: pass an int, or bytes")
        with np.errstate(over="ignore"):
            data = np.array(value, f"f{size}").tobytes()
        return NamedBytes.of(data, f"f{8 * size}", value)
    if kind[0] == "f":
        raise ValueError(f"is of type .{kind}, got the integer {value}: pass {float(value)}")
    if not -(1 << (8 * size - 1)) <= value < 1 << (8 * size):
        raise ValueError(f"has {size} bytes, into which {value} does not fit")
    return (int(value) % (1 << (8 * size))).to_bytes(size, "little")


@dataclass
class Request:
    """Everything that one launch needs; `counted` if its record is wanted in full."""

    program: Program
    digest: str
    grid: Place
    block: Place
    params: bytes
    tensors: list[Labelled]
    shared: int = 0
    settings: Options = field(default_factory=Options)
    counted: bool = True
    named: Mapping[int, NamedBytes] = field(default_factory=dict)


def run(request: Request) -> Launch:
    """Execute a launch and return (and publish) its record.

    Raises:
        ReplayError: for anything the kernel must not do; memory outside the known tensors is
            never touched.
    """
    settings = OPTIONS.get()
    kernel, static = request.program.kernel.name, request.program.layout.shared_size
    require_launchable(kernel, request.grid, request.block, static, request.shared)
    require_subnormals()
    started = perf_counter()
    program = request.program
    if (retranslated := TRANSLATION.get()) is not None:
        program = retranslated(program)
    elif settings.check_arithmetic:
        program = checked(program)
    request = replace(request, settings=settings, program=program)
    launch = Launch(program.kernel.name, request.grid, request.block, request.digest)
    launch.tuning = TUNING.get()
    known, constants = _known(request), _constants(program)
    apart = settings.strict_provenance and retranslated is None
    regions = Windows(known, constants) if apart else Regions(known, constants)
    if isinstance(regions, Windows):
        own = [tensor for _, tensor in request.tensors]
        request.params = moved_parameters(program, request.params, own, regions)
    history = _history(settings, program)
    runs, left = np.zeros(len(program.blocks)), prod(request.grid)
    with np.errstate(all="ignore"):
        for blocks in _batches(request):
            runs += _run_batch(request, blocks, regions, history, launch)
            left -= len(blocks)
            if settings.after_batch is not None:
                settings.after_batch()
    if history is not None:
        launched(history, regions)
    if request.counted:
        count_instructions(launch, program, runs)
    launch.miscounted_at = _decisive(program) if left else ""
    launch.seconds = perf_counter() - started
    publish(launch)
    return launch


def _known(request: Request) -> list[Extents]:
    arguments = Extents(request.tensors)
    known = [arguments, *reachable()]
    starts = {_word_at(request.params, start) for start in _tables(request.program)}
    if starts:
        tables = [row for row in arguments.measured()[0] if row[1].data_ptr() in starts]
        near = [row for each in known for row in each.measured()[0]] if tables else []
        known.append(Extents(listed(tables, near)))
    return known


@cache
def _tables(program: Program) -> frozenset[int]:
    """Where among the parameters addresses lie behind which a kernel loads further addresses."""
    loads = address_loads(program)
    code = [i for i in program.kernel.code if id(i) in loads]
    return frozenset(start for i in code for start in _starts(program, i))


def _constants(program: Program) -> list[tuple[str, int, int, object]]:
    return [
        (name, -(-memory.ctypes.data // 16) * 16, variable.size, memory)
        for name, (variable, memory) in program.layout.constants.items()
    ]


def _history(settings: Options, program: Program) -> History | None:
    if not (settings.check_races or settings.unwritten):
        return None
    fenced, word = _fenced(program), _word(program)
    return History(
        settings.check_races,
        settings.unwritten,
        fenced,
        word,
        program.kernel,
        settings.shake_sums,
        program.waits_for_blocks,
    )


@cache
def _decisive(program: Program) -> str:
    """Source line of an atomic whose value decides what is stored; empty if there is none."""
    code = program.kernel.code
    return next((one.place for one in code if decides(code, one)), "")


@cache
def _fenced(program: Program) -> bool:
    """True if the kernel has a fence that reaches beyond its block."""
    fences = (i for i in program.kernel.code if family(i) in ("membar", "fence"))
    return any("cta" not in fence.parts for fence in fences)


@cache
def _word(program: Program) -> int:
    """Bytes of the shortest load or store of the kernel; 1 where another instruction moves data."""
    shortest = 8
    for instruction in program.kernel.code:
        if not any(isinstance(operand, Mem) for operand in instruction.operands):
            continue
        if family(instruction) not in ("ld", "st", "atom", "red"):
            return 1
        kind = instruction.parts[-1]
        if "param" not in instruction.parts:
            shortest = min(shortest, width(kind) if kind in NUMPY else 1)
    return shortest


def _batches(request: Request) -> Iterator[Array]:
    """Linear block indices, batch by batch."""
    settings, grid = request.settings, request.grid
    threads = request.block[0] * request.block[1] * request.block[2]
    per_batch = settings.together or max(1, LANES // threads)
    shared = _shared_size(request)
    if shared and not settings.together:
        per_batch = max(1, min(per_batch, SHARED_LIMIT // shared))
    if not settings.together and request.program.waits_for_blocks:
        per_batch = max(per_batch, PROCESSORS)
    count = grid[0] * grid[1] * grid[2]
    if settings.only_blocks is not None:
        chosen = np.array([b for b in settings.only_blocks if 0 <= b < count], np.int64)
    elif settings.only_ends is not None:
        chosen = near_ends(grid, settings.only_ends, settings.and_middle)
        if grid[1] == grid[2] == 1:
            beside = parts(count, settings.only_ends, settings.and_parts)
            chosen = np.unique(np.concatenate([chosen, *beside]))
    elif settings.order == "permuted":
        chosen = np.random.default_rng(settings.seed).permutation(count)
    elif settings.order == "backwards":
        chosen = np.arange(count)[::-1]
    else:
        for start in range(0, count, per_batch):
            yield np.arange(start, min(start + per_batch, count))
        return
    for start in range(0, len(chosen), per_batch):
        yield chosen[start : start + per_batch]


def _shared_size(request: Request) -> int:
    return -(-(request.program.layout.shared_size + request.shared) // 16) * 16


def _run_batch(
    request: Request,
    blocks: Array,
    regions: Regions,
    memory: History | None,
    launch: Launch,
) -> Array:
    """Run a batch; returns how many threads ran each block of code."""
    program, threads = request.program, request.block[0] * request.block[1] * request.block[2]
    local = -(-program.layout.local_size // 16) * 16
    batch = Batch(
        blocks,
        threads,
        request.grid,
        request.block,
        request.params,
        regions,
        np.full((len(blocks), _shared_size(request)), request.settings.garbage, np.uint8),
        np.full((len(blocks) * threads if local else 0, local), request.settings.garbage, np.uint8),
        program.kernel.name,
    )
    batch.counted, batch.named = request.counted, request.named
    batch.pointers = partial(_pointers, program, request.params)
    if isinstance(regions, Windows):
        batch.windows, batch.address_loads = regions, address_loads(program)
    if memory is not None:
        batch.checks = BatchChecks(memory, batch)
    settings = request.settings
    execution = Execution(program, batch, settings.max_steps, settings.patience)
    execution.run()
    if request.counted:
        count_accesses(launch, batch)
    return np.array(execution.runs, np.float64)


def _pointers(program: Program, params: bytes, instruction: Instruction) -> list[int]:
    """Values of the 64-bit parameters that an address derives from."""
    return [_word_at(params, start) for start in _starts(program, instruction)]


def _starts(program: Program, instruction: Instruction) -> list[int]:
    """Where among the parameters those lie."""
    wide = {v.name for v, _ in program.kernel.params if v.size == 8}
    names = parameters_of_address(program.kernel, instruction)
    return [program.layout.params[name] for name in names if name in wide]


def _word_at(params: bytes, start: int) -> int:
    return int.from_bytes(params[start : start + 8], "little")


def run_ptx(
    ptx_text: str,
    kernel_name: str,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: Sequence[torch.Tensor | int | float | bytes | HostNumber],
    *,
    shared: int = 0,
) -> Launch:
    """Run a kernel from PTX text.

    Args:
        ptx_text: A PTX module.
        kernel_name: Its entry to run.
        grid: Blocks in up to three dimensions.
        block: Threads in up to three dimensions.
        args: One per parameter: a CPU tensor for a pointer, a number, or the raw bytes of a
            structure.
        shared: Bytes of dynamic shared memory.

    Returns:
        The launch record; tensors are written in place.
    """
    with launching(kernel_name):
        program, digest = program_of(ptx_text, kernel_name)
        tensors: list[Labelled] = []
        values: list[int | float | bytes] = []
        for index, arg in enumerate(args):
            if isinstance(arg, torch.Tensor):
                tensors.append((f"argument {index}", arg))
                values.append(arg.data_ptr())
            else:
                values.append(NamedFloat.of(arg) if isinstance(arg, HostNumber) else arg)
        params, named = pack(program, values)
        request = Request(program, digest, place(grid), place(block), params, tensors, shared)
        request.named = named
        return run(request)


def place(extent: Sequence[int]) -> Place:
    """One to three extents as x, y, z."""
    x, y, z = (int(n) for n in [*extent, 1, 1, 1][:3])
    return x, y, z
