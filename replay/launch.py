"""One launch from start to record: parameters, memory, batches of blocks, counters."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

import numpy as np
import torch

from twinstep.replay.dtypes import NUMPY, Array, raw, width
from twinstep.replay.errors import ReplayError
from twinstep.replay.execute import Execution
from twinstep.replay.flow import family
from twinstep.replay.lanes import Batch, Place
from twinstep.replay.memory import Regions
from twinstep.replay.parse import parse
from twinstep.replay.provenance import parameters_behind
from twinstep.replay.record import Launch, Traffic, class_of, publish
from twinstep.replay.shadow import Memory, Shadow, Unwritten
from twinstep.replay.syntax import Instruction, Mem
from twinstep.replay.translate import Program, translate

LANES = 16384
"""Threads per batch: large enough to hide NumPy's overhead, small enough for the cache."""

SHARED_LIMIT = 64 << 20
"""Bytes of shared memory that one batch may take."""

Labelled = tuple[str, torch.Tensor]
Provider = Callable[[], Iterable[torch.Tensor]]


@dataclass(frozen=True)
class Options:
    """How launches are run.

    Attributes:
        check_races: Report two threads that touch the same bytes, one writing, without order.
        unwritten: Bytes that nobody has written; reading one is an error.
        order: "natural", or "permuted" to run blocks in a shuffled order.
        seed: Of the shuffle.
        only_blocks: Linear indices of the blocks to run, or None for all.
        only_ends: How many blocks to run at either end of the grid, or None for all.
        max_steps: Steps after which a batch is taken to be stuck.
        after_batch: Called whenever some blocks have run.
    """

    check_races: bool = False
    unwritten: Unwritten | None = None
    order: str = "natural"
    seed: int = 0
    only_blocks: tuple[int, ...] | None = None
    only_ends: int | None = None
    max_steps: int = 50_000_000
    after_batch: Callable[[], None] | None = None


_DEFAULTS = Options()
_OPTIONS: ContextVar[Options] = ContextVar("replay options", default=_DEFAULTS)
_ALLOWED: ContextVar[tuple[Labelled, ...]] = ContextVar("replay allowed", default=())
_PROVIDERS: list[Provider] = []
TRANSLATION: ContextVar[Callable[[Program], Program] | None] = ContextVar(
    "replay translation", default=None
)
"""What to run in place of a program, inside `replay.lift.lifting`."""
_PROGRAMS: dict[tuple[str, str], Program] = {}
_LOCK = threading.RLock()


@contextmanager
def options(
    *,
    check_races: bool = False,
    uninitialised: Iterable[torch.Tensor] | None = None,
    order: str = "natural",
    seed: int = 0,
    only_blocks: Iterable[int] | None = None,
    only_ends: int | None = None,
    max_steps: int = 50_000_000,
    after_batch: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Run the launches of this thread inside the context with other `Options`.

    Args:
        check_races: See `Options`.
        uninitialised: Tensors of which nobody has written anything yet: reading a byte before a
            launch inside this context has written it is an error, in shared memory too (which an
            empty list checks alone).
        order: See `Options`.
        seed: See `Options`.
        only_blocks: See `Options`.
        only_ends: See `Options`.
        max_steps: See `Options`.
        after_batch: See `Options`.
    """
    if order not in ("natural", "permuted"):
        raise ValueError(f'order is {order!r}, but should be "natural" or "permuted".')
    chosen = None if only_blocks is None else tuple(only_blocks)
    unwritten = None if uninitialised is None else Unwritten(tuple(uninitialised))
    token = _OPTIONS.set(
        Options(check_races, unwritten, order, seed, chosen, only_ends, max_steps, after_batch)
    )
    try:
        yield
    finally:
        _OPTIONS.reset(token)


@contextmanager
def allow(*tensors: torch.Tensor, **named: torch.Tensor) -> Iterator[None]:
    """Let launches of this thread inside the context touch these tensors as well.

    In records and faults a tensor goes by the name it is given here, besides the kernel's own.
    """
    before = _ALLOWED.get()
    new = [(f"allowed[{len(before) + i}]", t) for i, t in enumerate(tensors)]
    token = _ALLOWED.set((*before, *new, *named.items()))
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def register_buffer_provider(provider: Provider) -> None:
    """Ask a function before every launch for further tensors that kernels may touch.

    For launchers that pass addresses in tables: the function returns the tensors whose addresses
    are in live tables. Registering the same function twice has no effect.
    """
    with _LOCK:
        if provider not in _PROVIDERS:
            _PROVIDERS.append(provider)


def program_of(ptx: str, kernel: str) -> tuple[Program, str]:
    """The translation of a kernel (made once) and the hash of its text."""
    digest = hashlib.sha256(ptx.encode()).hexdigest()
    with _LOCK:
        program = _PROGRAMS.get((digest, kernel))
        if program is None:
            program = _PROGRAMS[digest, kernel] = translate(parse(ptx), kernel)
    return program, digest


def pack(program: Program, values: Sequence[int | float | bytes]) -> bytes:
    """Parameter bytes from values in order of declaration."""
    params = program.kernel.params
    if len(values) != len(params):
        raise ReplayError(
            f"Kernel {program.kernel.name} has {len(params)} parameters, got {len(values)}."
        )
    data = bytearray(program.layout.param_size)
    for (variable, kind), value in zip(params, values, strict=True):
        start = program.layout.params[variable.name]
        if isinstance(value, bytes):
            encoded = value
        elif isinstance(value, float):
            encoded = np.array(
                value, NUMPY[kind] if kind[0] == "f" else f"f{width(kind)}"
            ).tobytes()
        else:
            mask = (1 << (8 * width(kind))) - 1
            encoded = np.array(value & mask, NUMPY[raw(kind)]).tobytes()
        data[start : start + len(encoded)] = encoded
    return bytes(data)


@dataclass
class Request:
    """Everything that one launch needs."""

    program: Program
    digest: str
    grid: Place
    block: Place
    params: bytes
    tensors: list[Labelled]
    shared: int = 0
    settings: Options = field(default_factory=Options)


def run(request: Request) -> Launch:
    """Execute a launch and return (and publish) its record.

    Raises:
        ReplayError: for anything the kernel must not do; memory outside the known tensors is
            never touched.
    """
    settings = _OPTIONS.get()
    with _LOCK:
        started = perf_counter()
        request = replace(request, settings=settings)
        if (retranslated := TRANSLATION.get()) is not None:
            request = replace(request, program=retranslated(request.program))
        launch = Launch(request.program.kernel.name, request.grid, request.block, request.digest)
        regions = Regions(_known(request), _constants(request.program))
        shadows = _shadow_memory(settings, request.program)
        with np.errstate(all="ignore"):
            for blocks in _batches(request):
                _run_batch(request, blocks, regions, shadows, launch)
                if settings.after_batch is not None:
                    settings.after_batch()
        launch.seconds = perf_counter() - started
    publish(launch)
    return launch


def _known(request: Request) -> list[Labelled]:
    tensors = list(request.tensors)
    tensors += _ALLOWED.get()
    for provider in _PROVIDERS:
        tensors += [(f"table[{i}]", t) for i, t in enumerate(provider())]
    return [(label, t) for label, t in tensors if t.device.type == "cpu"]


def _constants(program: Program) -> list[tuple[str, int, int, object]]:
    return [
        (name, -(-memory.ctypes.data // 16) * 16, variable.size, memory)
        for name, (variable, memory) in program.layout.constants.items()
    ]


def _shadow_memory(settings: Options, program: Program) -> Memory | None:
    if not (settings.check_races or settings.unwritten):
        return None
    fenced = any(family(i) in ("membar", "fence") for i in program.kernel.code)
    return Memory(settings.check_races, settings.unwritten, fenced, _word(program))


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
    per_batch = max(1, LANES // threads)
    shared = _shared_size(request)
    if shared:
        per_batch = max(1, min(per_batch, SHARED_LIMIT // shared))
    count = grid[0] * grid[1] * grid[2]
    if settings.only_blocks is not None:
        chosen = np.array([b for b in settings.only_blocks if 0 <= b < count], np.int64)
    elif settings.only_ends is not None:
        ends = min(settings.only_ends, count)
        chosen = np.union1d(np.arange(ends), np.arange(count - ends, count))
    elif settings.order == "permuted":
        chosen = np.random.default_rng(settings.seed).permutation(count)
    else:
        for start in range(0, count, per_batch):
            yield np.arange(start, min(start + per_batch, count))
        return
    for start in range(0, len(chosen), per_batch):
        yield chosen[start : start + per_batch]


def _shared_size(request: Request) -> int:
    size = max(request.shared, request.program.layout.shared_size)
    return -(-size // 16) * 16


def _run_batch(
    request: Request,
    blocks: Array,
    regions: Regions,
    memory: Memory | None,
    launch: Launch,
) -> None:
    program, threads = request.program, request.block[0] * request.block[1] * request.block[2]
    local = -(-program.layout.local_size // 16) * 16
    batch = Batch(
        blocks,
        threads,
        request.grid,
        request.block,
        request.params,
        regions,
        np.full((len(blocks), _shared_size(request)), 0xCD, np.uint8),
        np.full((len(blocks) * threads if local else 0, local), 0xCD, np.uint8),
        program.kernel.name,
    )
    batch.pointers = partial(_pointers, program, request.params)
    if memory is not None:
        batch.shadow = Shadow(memory, batch)
    execution = Execution(program, batch, request.settings.max_steps)
    execution.run()
    _count(launch, program, execution, batch)


def _pointers(program: Program, params: bytes, instruction: Instruction) -> list[int]:
    """Values of the 64-bit parameters that an address derives from."""
    wide = {v.name for v, _ in program.kernel.params if v.size == 8}
    starts = [
        program.layout.params[name]
        for name in parameters_behind(program.kernel, instruction)
        if name in wide
    ]
    return [int.from_bytes(params[start : start + 8], "little") for start in starts]


def _count(launch: Launch, program: Program, execution: Execution, batch: Batch) -> None:
    totals = np.array(execution.runs, np.int64) @ program.census
    for opcode, count in zip(program.opcodes, totals.tolist(), strict=True):
        if count:
            launch.opcodes[opcode] += count
            launch.classes[class_of(opcode)] += count
    for place in program.noted:
        runs = execution.runs[place]
        for name, count in program.charges[place].items() if runs else ():
            launch.approximations[name] += runs * count
            launch.approximated_at[name] = program.charged_at[name]
        launch.barriers += runs if program.blocks[place].waits == "block" else 0
    for (site, index), (threads, moved) in batch.traffic.items():
        traffic = launch.buffers.setdefault(batch.regions.regions[index].label, Traffic())
        launch.widths[site.kind, site.bytes] += threads
        if site.kind != "write":
            traffic.read += moved
        if site.kind != "read":
            traffic.written += moved
        traffic.reads += threads if site.kind == "read" else 0
        traffic.writes += threads if site.kind == "write" else 0
        traffic.atomics += threads if site.kind == "atomic" else 0
    counts = batch.counts
    launch.shared_read += counts["shared read"] + counts["shared atomic"]
    launch.shared_written += counts["shared write"] + counts["shared atomic"]


def run_ptx(
    ptx_text: str,
    kernel_name: str,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: Sequence[torch.Tensor | int | float | bytes],
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
    program, digest = program_of(ptx_text, kernel_name)
    tensors: list[Labelled] = []
    values: list[int | float | bytes] = []
    for index, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            tensors.append((f"argument {index}", arg))
            values.append(arg.data_ptr())
        else:
            values.append(arg)
    request = Request(
        program, digest, place(grid), place(block), pack(program, values), tensors, shared
    )
    return run(request)


def place(extent: Sequence[int]) -> Place:
    """One to three extents as x, y, z."""
    x, y, z = (int(n) for n in [*extent, 1, 1, 1][:3])
    return x, y, z
