"""State of the process that a call must leave as it was: random numbers, modes, lists, memory."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import pickle
import random
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor

from twinstep.parity.cases.guarded_memory import GuardedMemory
from twinstep.parity.operations.operation import Role
from twinstep.parity.registry.engines import live_subnormals

Read = Callable[[], Any]
Restore = Callable[[Any], object]


Filters = tuple[int, list[tuple[object, ...]]]


def _warning_filters() -> Filters:
    return len(sys.modules), list(warnings.filters)


def _same_filters(before: Filters, after: Filters) -> bool:
    # Modules that are imported meanwhile add filters of their own, but none for every warning.
    imported = before[0] != after[0]
    new = [row for row in after[1] if row not in before[1]]
    whole = any(row[1] is None and row[2] is Warning and row[3] is None for row in new)
    return before[1] == after[1] or (imported and not whole)


def _set_filters(before: Filters) -> None:
    cast("list[Any]", warnings.filters)[:] = before[1]


def _set_environment(before: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(before)


def _cuda_state() -> object:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    device = torch.cuda.current_device()
    return device, torch.cuda.current_stream().cuda_stream, bytes(torch.cuda.get_rng_state())


def _signal_handlers() -> object:
    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    return [(number, signal.getsignal(number)) for number in watched]


def _set_handlers(before: list[tuple[int, Any]]) -> None:
    for number, handler in before:
        signal.signal(number, handler)


@dataclass(frozen=True)
class Part:
    """Part of the process's state: its name, how it is read, put back and compared.

    Where a program may have it otherwise, `turned` is a value that no new process has.
    """

    name: str
    read: Read
    restore: Restore = bool
    same: Callable[[Any, Any], bool] = lambda before, after: before == after
    turned: Any = None


def _deterministic() -> object:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _backends() -> tuple[bool, ...]:
    cudnn, product = torch.backends.cudnn, torch.backends.cuda.matmul
    return (
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        product.allow_fp16_reduced_precision_reduction,
        product.allow_bf16_reduced_precision_reduction,
    )


def _set_backends(was: tuple[bool, ...]) -> None:
    cudnn, product = torch.backends.cudnn, torch.backends.cuda.matmul
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = was[:3]
    product.allow_fp16_reduced_precision_reduction = was[3]
    product.allow_bf16_reduced_precision_reduction = was[4]


PARTS = (
    Part("torch's random numbers", torch.get_rng_state, torch.set_rng_state, torch.equal),
    Part(
        "NumPy's random numbers",
        lambda: pickle.dumps(np.random.get_state()),  # noqa: NPY002
        lambda was: np.random.set_state(pickle.loads(was)),  # noqa: NPY002, S301
    ),
    Part("Python's random numbers", random.getstate, random.setstate),
    Part(
        "the default dtype",
        torch.get_default_dtype,
        torch.set_default_dtype,
        turned=torch.bfloat16,
    ),
    Part("the default device", torch.get_default_device, torch.set_default_device),
    Part(
        "whether gradients are recorded",
        torch.is_grad_enabled,
        torch.set_grad_enabled,
        turned=False,
    ),
    Part("inference mode", torch.is_inference_mode_enabled),
    Part("autocast", lambda: (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))),
    Part(
        "deterministic algorithms",
        _deterministic,
        lambda was: torch.use_deterministic_algorithms(was[0], warn_only=was[1]),
    ),
    Part(
        "the precision of float32 products (TF32)",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        turned="high",
    ),
    Part("switches of torch's backends", _backends, _set_backends),
    Part("the number of torch's threads", torch.get_num_threads, torch.set_num_threads),
    Part(
        "subnormal numbers, now flushed to zero",
        live_subnormals,
        lambda was: torch.set_flush_denormal(not was),
    ),
    Part(
        "the warning filters",
        _warning_filters,
        _set_filters,
        _same_filters,
    ),
    Part(
        "NumPy's error handling",
        np.geterr,
        lambda was: np.seterr(**was),
        turned=dict.fromkeys(("divide", "over", "under", "invalid"), "ignore"),
    ),
    Part("the environment", lambda: dict(os.environ), _set_environment),
    Part("the working folder", os.getcwd, os.chdir),
    Part("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit, turned=3210),
    Part("signal handlers", _signal_handlers, _set_handlers),
    Part(
        "the garbage collector's switch",
        gc.isenabled,
        lambda was: gc.enable() if was else gc.disable(),
        turned=False,
    ),
    Part("CUDA's device, stream or random numbers", _cuda_state),
)


TASKS = Path("/proc/self/task")


def child_processes() -> list[str]:
    """Numbers of the processes that this one has started."""
    found: list[str] = []
    for task in os.listdir(TASKS) if TASKS.exists() else ():
        # A thread may end meanwhile.
        with contextlib.suppress(OSError):
            found += (TASKS / task / "children").read_text().split()
    return found


@dataclass
class ProcessState:
    """State before a call; afterwards `changes` names what differs, and puts it back."""

    values: list[object] = field(default_factory=lambda: [part.read() for part in PARTS])

    def changes(self) -> Iterator[str]:
        """A sentence for each part that the call has changed."""
        for part, before in zip(PARTS, self.values, strict=True):
            after = part.read()
            if not part.same(before, after):
                yield f"changes {part.name}"
                part.restore(before)


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """The state of now, whatever is left changed in between."""
    before = ProcessState()
    try:
        yield
    finally:
        list(before.changes())


@contextlib.contextmanager
def turned(narrow: torch.dtype) -> Iterator[None]:
    """Every switch that a program may have otherwise, turned to where no new process has it.

    Args:
        narrow: dtype of autocast, and the default one. In another one than the program's torch
            refuses to join some tensors.
    """
    switches = [(part, part.read()) for part in PARTS if part.turned is not None]
    try:
        for part, _ in switches:
            part.restore(part.turned)
        torch.set_default_dtype(narrow)
        with torch.autocast("cpu", narrow):
            yield
    finally:
        for part, before in switches:
            part.restore(before)


class NewTensors:
    """Tensors that a call makes and does not let go.

    Objects that exist before the call are set aside, so that only new ones are looked at.
    """

    def __init__(self) -> None:
        self.cyclic: tuple[int, ...] = ()
        gc.freeze()

    def found(self) -> list[weakref.ref[Tensor]]:
        """References to those that are alive, which do not keep them so; to be called once.

        What only a cycle of references has kept is found by its address, in `cyclic`.
        """
        places = dict(_places())
        if places:
            gc.collect()
        found = [weakref.ref(x) for x in gc.get_objects() if _has_memory(x)]
        self.cyclic = tuple(places[number] for number in places.keys() - dict(_places()).keys())
        gc.unfreeze()
        return found


def _places() -> Iterator[tuple[int, int]]:
    """Number and address of each new tensor; 0 for what lies nowhere."""
    for value in gc.get_objects():
        if _has_memory(value):
            plain = value.layout is torch.strided and value.numel()
            yield id(value), value.data_ptr() if plain else 0


def _has_memory(value: object) -> TypeGuard[Tensor]:
    """True for a tensor, but not for one that torch.compile has traced with and keeps."""
    if not issubclass(type(value), Tensor):
        return False
    tensor = cast(Tensor, value)
    try:
        return tensor.layout is not torch.strided or tensor.untyped_storage().device.type != "meta"
    except RuntimeError:
        return False


def left_behind(made: Iterable[weakref.ref[Tensor]]) -> dict[str, int]:
    """Tensors alive of some that calls have made, their bytes, threads and processes."""
    alive = [tensor for one in made if (tensor := one()) is not None]
    storages = [x.untyped_storage() for x in alive if x.layout is torch.strided]
    sizes = {storage._cdata: storage.nbytes() for storage in storages}
    return {
        "tensors": len(alive),
        "bytes": sum(sizes.values()),
        "threads": len(threading.enumerate()),
        "processes": len(child_processes()),
    }


def kept_gradients(memory: GuardedMemory, cyclic: Sequence[int]) -> Iterator[str]:
    """Sentences if tensors are kept that lie in the gradients of a call that has returned.

    Args:
        memory: of the call.
        cyclic: addresses of tensors that a cycle of references has kept.
    """
    alive = (tensor for one in memory.made if (tensor := one()) is not None)
    plain = (x for x in alive if x.layout is torch.strided and x.numel())
    kept = sum(_in_gradients(tensor.data_ptr(), memory) for tensor in plain)
    if kept:
        yield f"keeps the memory of {kept} gradients, which whoever drops them wants back"
    kept = sum(_in_gradients(place, memory) for place in cyclic)
    if kept:
        yield f"keeps {kept} gradients in a cycle of references until the garbage collector runs"


def _in_gradients(address: int, memory: GuardedMemory) -> bool:
    """True if an address lies in one of the gradients that the memory holds."""
    names = memory.case.operation.lists_of(Role.GRAD)
    at = address - memory.block.data_ptr()
    return any(span.name in names and span.start <= at < span.stop for span in memory.spans)


Function = tuple[object, object]


@dataclass
class Functions:
    """Functions and classes of the judge, torch and Python, and their code, as they were."""

    known: dict[str, Function] = field(default_factory=lambda: dict(_functions()))

    def replaced(self) -> list[str]:
        """Names of what is another object, or has other code, by now."""
        now = dict(_functions())
        gone = (None, None)
        return [
            name
            for name, was in self.known.items()
            if any(old is not new for old, new in zip(was, now.get(name, gone), strict=True))
        ]


def _functions() -> Iterator[tuple[str, Function]]:
    for name, module in list(sys.modules.items()):
        if name in ("torch", "builtins", "math") or name.partition(".")[0] == "twinstep":
            for word, value in list(vars(module).items()):
                if callable(value):
                    yield f"{name}.{word}", _identity(value)
                if isinstance(value, type) and value.__module__.startswith("twinstep"):
                    for inner, method in list(vars(value).items()):
                        yield f"{name}.{word}.{inner}", _identity(method)
    for word in dir(Tensor):
        yield f"torch.Tensor.{word}", _identity(inspect.getattr_static(Tensor, word))


def _identity(value: object) -> Function:
    return value, getattr(value, "__code__", None)
