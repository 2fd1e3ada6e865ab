"""A GPU box without a GPU: replay reports cuda, and every process of `gpu-check` is a fork.

Parts run as on a GPU, with small sizes. What torch's CPU build lacks is modelled here: graphs,
generators on the device, waits that are errors, the driver that loads PTX, compute-sanitizer.
Everything is patched in forks that end; times mean nothing.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import itertools
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _pop_mode
from torch.utils._python_dispatch import TorchDispatchMode

import twinstep.replay
from twinstep.benchmarks import (
    compiled,
    engines,
    graph,
    judged,
    large,
    offload,
    opcodes,
    part,
    sanitizer,
    steps,
    timing,
)
from twinstep.benchmarks.part import Job
from twinstep.parity.laws import LAWS
from twinstep.parity.proof.gates.compile.cuda import CudaVariant, cuda_variants_of
from twinstep.parity.proof.gates.compile.variants import Variant, variants_of
from twinstep.parity.registry.kernels import Kernel
from twinstep.parity.runner.calls import large_places, large_tensors
from twinstep.parity.sequences import rules
from twinstep.replay.triton import streams, torch_cuda
from twinstep.replay.triton.launcher import Launcher
from twinstep.replay.triton.torch_cuda import _Sides

CLEAN = "========= ERROR SUMMARY: 0 errors"
# Not modelled: torch's numbers of devices (process_state).
KEPT = ("value", "no_host_read", "graph_capture", "large_index")
CLASSES = graph.CLASSES[:2]
RUN = threading.Thread.run
Fault = Callable[[Job], None]


def nothing(job: Job) -> None:
    """No fault."""


class Box:
    """Runs jobs in forks of this process, with a GPU that is simulated.

    Args:
        fault: called in every fork before it runs.
    """

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.jobs: list[Job] = []

    def __call__(self, job: Job) -> tuple[int | None, str]:
        """In the place of `part.run_job`."""
        self.jobs.append(job)
        with tempfile.TemporaryFile("w+") as output:
            child = os.fork()
            if child == 0:
                os._exit(self._child(job, output.fileno()))
            status = _status(child, job.seconds)
            output.seek(0)
            return status, output.read()

    def all(self, jobs: Sequence[Job], _: int) -> Iterator[tuple[int, tuple[int | None, str]]]:
        """In the place of `part.run_jobs`; a fork beside threads would lose what they hold."""
        yield from ((number, self(job)) for number, job in enumerate(jobs))

    def _child(self, job: Job, output: int) -> int:
        os.setsid()
        for number in (1, 2):
            os.dup2(output, number)
        sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
        torch.set_num_threads(1)
        faulthandler.disable()
        os.environ.update(job.environment)
        try:
            enter(job)
            self.fault(job)
            if job.module == "parity":
                sys.argv = [job.module, *job.arguments]
                # An import by another test would be a warning, and so an error.
                sys.modules.pop("twinstep.parity.__main__", None)
                runpy.run_module("twinstep.parity", run_name="__main__")
            return int(import_module(f"twinstep.{job.module}").main(job.arguments))
        except SystemExit as ended:
            return int(ended.code or 0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}")
            return 1
        finally:
            if job.prefix:
                print(CLEAN)
            sys.stdout.flush()


def _status(child: int, seconds: float | None) -> int | None:
    """Exit status of a fork; None where it was killed with its group, being too slow."""
    deadline = time.monotonic() + (seconds or 600.0)
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def enter(job: Job) -> None:
    """Let this process find the GPU, and make everything small."""
    if job.module == "benchmarks.engines" and job.arguments[0] == "replay":
        _leave()
        return
    _in_every_thread()
    put(
        torch.cuda,
        CUDAGraph=Graph,
        Event=Event,
        graph=capture,
        is_current_stream_capturing=lambda: bool(Graph.capturing),
        set_sync_debug_mode=Waits.set,
        get_sync_debug_mode=lambda: Waits.mode,
        synchronize=_synchronize,
    )
    put(torch, Generator=Generator)
    put(Launcher, __call__=_launch)
    # A pickle does not hold on which side a tensor is.
    put(rules, pickle=SimpleNamespace(dumps=lambda value: value, loads=copy.deepcopy))
    _small()


def _leave() -> _Sides:
    """Let this thread find no GPU; what it found before."""
    sides = torch_cuda._SIDES.get()
    assert sides is not None
    torch_cuda._SIDES.set(None)
    _pop_mode()
    return sides


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    if not torch_cuda.modelled():
        yield
        return
    sides = _leave()
    try:
        yield
    finally:
        torch_cuda._SIDES.set(sides)
        sides.__enter__()


def _small() -> None:
    def few(every: Callable[[], list[Any]], count: int) -> Callable[[], list[Any]]:
        def some() -> list[Any]:
            with _outside():
                return every()[:count]

        return some

    def variants(kernels: Sequence[Kernel], **_: bool) -> list[Variant]:
        with _outside():
            return variants_of(kernels[:1])

    def in_cuda(kernels: Sequence[Kernel]) -> list[CudaVariant]:
        with _outside():
            return cuda_variants_of(kernels[:1])[:2]

    put(compiled, WORKERS=2, variants_of=variants, cuda_variants_of=in_cuda)
    put(judged, ONLY=("fast.FusedAdam", "clip_factor"), LEFT_OUT=tuple({*LAWS} - {*KEPT}))
    put(judged, LARGE=("triton.cast_copy",))
    put(large_places, ODD=2**14)
    put(large_tensors, ELEMENTS={"cuda": 2**20 + 4_099})
    put(engines, SIZES={"flat": ((33,),), "list": ((7, 0),), "": ((),)})
    put(engines, REGIMES=engines.REGIMES[:1], exact_kernels=few(engines.exact_kernels, 1))
    put(graph, LAYOUTS={"flat": (33,), "list": (9, 1)}, SIZES=(33, 1), CLASSES=CLASSES)
    put(opcodes, INSTRUCTIONS=opcodes.INSTRUCTIONS[:4], COUNT=2 * opcodes.THREADS)
    put(opcodes, Loaded=Loaded, replayed=_outside()(opcodes.replayed))
    put(timing, NUMEL=2**10, TENSORS=3, ROUNDS=3, WARM_UP=1, CPU_NUMEL=2**10, CPU_ROUNDS=2)
    put(offload, WARM_UP=1)
    put(steps, SHAPES={"large": (2, 128), "small": (4, 16)}, ROUNDS=2, WARM_UP=1)
    put(large, NUMEL=9001, PIECE=4096)
    put(sanitizer, DTYPES=("scalar", "bf16"), exact_kernels=few(engines.exact_kernels, 2))


def put(owner: object, **values: object) -> None:
    """Replace attributes of what another module holds, in a process that ends."""
    for name, value in values.items():
        setattr(owner, name, value)


def _in_every_thread() -> None:
    """Threads find the GPU, too: ranks are threads.

    A fork of a fork enters again, and a mode that is on twice would be asked within its own answer.
    """
    sides = torch_cuda._SIDES.get()
    assert sides is not None

    def wrapped(self: threading.Thread) -> None:
        torch_cuda._SIDES.set(sides)
        with sides:
            RUN(self)

    threading.Thread.run = wrapped  # type: ignore[method-assign]


class Generator(torch.Generator):
    """A generator for any device."""

    def __new__(cls, device: object = None) -> Generator:
        """On the CPU."""
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


class Graph:
    """A CUDA graph: what is captured is not done, and done again by every replay."""

    capturing: list[Graph] = []  # noqa: RUF012  # of the process

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []

    def replay(self) -> None:
        """Do what was captured."""
        with torch.no_grad():
            for action in self.work:
                action()


@contextlib.contextmanager
def capture(into: Graph) -> Iterator[None]:
    """In the place of `torch.cuda.graph`."""
    Graph.capturing.append(into)
    try:
        with _Recorded(into):
            yield
    finally:
        Graph.capturing.pop()


class _Recorded(TorchDispatchMode):
    """Notes operators; results of those that make a tensor are undefined until a replay."""

    def __init__(self, into: Graph) -> None:
        super().__init__()
        self.into = into

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Note one."""
        if "_local_scalar_dense" in str(func):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        if func._schema.is_mutable:
            self.into.work.append(partial(func, *args, **(kwargs or {})))
            return args[0]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result._is_view():
            self.into.work.append(lambda: result.copy_(func(*args, **(kwargs or {}))))
        return result


_execute = Launcher.__call__


def _launch(self: Launcher, *args: Any) -> None:
    if Graph.capturing:
        Graph.capturing[-1].work.append(partial(_execute, self, *args))
    else:
        _execute(self, *args)


def _synchronize(device: object = None) -> None:
    if Graph.capturing:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


class Waits(TorchDispatchMode):
    """An error for every read of a value, while that is the mode."""

    mode = 0
    active: Waits | None = None

    @classmethod
    def set(cls, mode: int | str) -> None:
        """In the place of `torch.cuda.set_sync_debug_mode`."""
        wanted = mode in ("error", 2)
        if wanted and cls.active is None:
            cls.active = cls()
            cls.active.__enter__()
        elif not wanted and cls.active is not None:
            cls.active.__exit__(None, None, None)
            cls.active = None
        cls.mode = 2 if wanted else 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Let it through unless the host would wait."""
        if "_local_scalar_dense" in str(func):
            raise RuntimeError("called a synchronizing CUDA operation")
        return func(*args, **(kwargs or {}))


class Event(streams.Event):
    """An event of a clock that ticks once a millisecond and event."""

    ticks = itertools.count()

    def record(self, stream: object = None) -> None:
        """Tick."""
        self._at = 1e-3 * next(self.ticks)


class Loaded:
    """A module that the driver has compiled, in the place of `replay.cuda.driver.Loaded`."""

    def __init__(self, text: str) -> None:
        self.text = text

    def launch(self, entry: str, blocks: int, threads: int, arguments: list[Any]) -> None:
        """Replay it."""
        with _outside():
            twinstep.replay.run_ptx(self.text, entry, (blocks,), (threads,), arguments)


@contextlib.contextmanager
def gpu_box(fault: Fault = nothing, tools: Path | None = None) -> Iterator[Box]:
    """A box in whose place of `part.run_job` all processes run.

    Args:
        fault: see `Box`.
        tools: an empty folder, in which compute-sanitizer is then to be found.
    """
    box, before, path = Box(fault), (part.run_job, part.run_jobs), os.environ["PATH"]
    # Torch loads it at the first call under a mode: once here, or in every fork.
    import_module("torch._dynamo")
    if tools is not None:
        (tools / sanitizer.PROGRAM).touch(0o755)
        os.environ["PATH"] = f"{tools}:{path}"
    put(part, run_job=box, run_jobs=box.all)
    try:
        twinstep.replay.activate(cuda=True)
        yield box
    finally:
        twinstep.replay.deactivate()
        put(part, run_job=before[0], run_jobs=before[1])
        os.environ["PATH"] = path
