"""Costs of a call on the host, counted: bytecodes, operators of torch, reads, fresh memory.

Each is counted for few and for many small tensors, so that what a call costs for each tensor stands
apart from what it costs once. Kernels for a GPU are launched by a driver that does nothing.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from twinstep.benchmarks.beside.subject import Shape, arguments_of
from twinstep.benchmarks.host import CASES, idle_launches
from twinstep.benchmarks.host import Subject as Stepped
from twinstep.parity.registry.kernels import Kernel
from twinstep.replay import launches

Facts = dict[str, float]
Trace = Callable[[FrameType, str, object], Any]
FEW, MANY = 4, 36  # tensors
EACH = 256  # elements of each
# torch waits for the device to give these to the host.
READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")
CLASSES = ("FusedAdam", "FP16Optimizer", "FP16UnfusedOptimizer", "BF16Optimizer", "FusedLamb")
CLASS_FEW, CLASS_MANY = 64, 320
WARM_UP = 3


def bytecodes(call: Callable[[], object]) -> int:
    """Bytecodes of Python that a call executes in this thread."""
    seen = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal seen
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        seen += event == "opcode"
        return trace

    before = sys.gettrace()
    # A collection would run finalisers of others in the middle of the call.
    gc.disable()
    sys.settrace(cast(Trace, trace))
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return seen


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators of torch that run inside: how many, reads by the host, bytes of fresh memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = self.reads = self.fresh = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[object] = (), kwargs: Any = None
    ) -> object:
        """Run the operator and count it."""
        given = {t.untyped_storage().data_ptr() for t in tensors_in([args, kwargs or {}])}
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        self.reads += str(func).split(".")[1] in READS
        new = {
            storage.data_ptr(): storage.nbytes()
            for storage in (t.untyped_storage() for t in tensors_in([result]))
        }
        self.fresh += sum(size for place, size in new.items() if place not in given)
        return result


def tensors_in(values: Sequence[object]) -> Iterator[Tensor]:
    """Tensors among values, and in lists and dicts of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(list(value.values()))


def facts_of(call: Callable[[], object], ready: Callable[[], object]) -> Facts:
    """Counts of one call, once it has settled; `ready` comes before each."""
    for _ in range(WARM_UP):
        ready()
        call()
    ready()
    with launches() as log:
        found: Facts = {"host bytecodes": bytecodes(call)}
    if log:
        # Replay's own Python is no cost of the kernel.
        found = {}
    ready()
    with Operators() as mode:
        call()
    return {
        **found,
        "torch operators": mode.calls,
        "host reads of device values": mode.reads,
        "bytes allocated": mode.fresh,
    }


def split(few: Facts, many: Facts, tensors: int) -> Facts:
    """Counts of the larger call, and what each tensor adds."""
    each = {f"{name} per tensor": (many[name] - few[name]) / tensors for name in many}
    # A bytecode more or less is no news where a call has thousands.
    once = {name: few[name] for name in ("host bytecodes",) if name in few}
    return {**many, **once, **each}


def of_kernel(kernel: Kernel, dtype: str, on_cpu: bool) -> Facts:
    """Counts of a kernel on the host."""
    layout = "list" in kernel.layouts
    idle = contextlib.nullcontext() if on_cpu else idle_launches()
    found = []
    with idle:
        for count in (FEW, MANY) if layout else (1,):
            shape = Shape(count, EACH)
            given = arguments_of(kernel.operation, dtype, shape, torch.device("cpu"))
            found.append(facts_of(lambda g=given: g.call(kernel), given.restore))  # type: ignore[misc]
    return split(found[0], found[1], MANY - FEW) if layout else found[0]


def of_classes() -> Iterator[tuple[str, Facts]]:
    """Counts of a step of each fast class that this checkout has."""
    with idle_launches():
        for name in CLASSES:
            if name not in CASES:
                continue
            found = []
            for count in (CLASS_FEW, CLASS_MANY):
                subject = Stepped(name, count)
                found.append(facts_of(subject.optimizer.step, subject.prepare))
            yield name, split(found[0], found[1], CLASS_MANY - CLASS_FEW)
