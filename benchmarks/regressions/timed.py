"""Rows that the gate times: kernels at some shapes, and steps of our classes on the host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from twinstep.benchmarks.beside.rows import Group, groups_of, ours, subject_of, takes
from twinstep.benchmarks.beside.subject import Shape, Subject
from twinstep.benchmarks.host import CASES, idle_launches
from twinstep.benchmarks.host import Subject as Stepped
from twinstep.benchmarks.regressions.host_counts import CLASSES
from twinstep.parity.registry.kernels import Kernel

TENSORS = 300  # of the models whose host time is taken


def labels(kernels: Sequence[Kernel], shapes: Sequence[Sequence[int]], classes: bool) -> list[str]:
    """Names of all that can be timed here."""
    found = [
        label_of(kernel, group)
        for group in groups_of(kernels, [Shape(*shape) for shape in shapes])
        for kernel in ours(kernels, group)
    ]
    return found + [f"class {name}" for name in CLASSES if classes and name in CASES]


def label_of(kernel: Kernel, group: Group) -> str:
    """Name of a kernel at a shape."""
    return f"{kernel.name} {group.dtype} {group.shape.tensors}x{group.shape.each}"


def subject_named(kernels: Sequence[Kernel], label: str) -> Subject:
    """The subject of that name.

    Raises:
        LookupError: this checkout has none.
    """
    name, _, rest = label.partition(" ")
    if name == "class":
        return class_subject(rest)
    dtype, _, size = rest.partition(" ")
    for kernel in kernels:
        if kernel.name == name and takes(kernel, dtype):
            tensors, each = map(int, size.split("x"))
            return subject_of(kernel, Group(kernel.operation.name, dtype, Shape(tensors, each)))
    raise LookupError(f"no kernel {name} for {dtype}")


def class_subject(name: str) -> Subject:
    """Host time of a step of one of our classes, in time of this thread; launches do nothing.

    Raises:
        LookupError: this checkout has no such class.
    """
    if name not in CASES:
        raise LookupError(f"no class {name}")
    idle = ExitStack()
    idle.enter_context(idle_launches())
    stepped = Stepped(name, TENSORS)
    return Subject(
        stepped.optimizer.step,
        stepped.prepare,
        torch.device("cpu"),
        each=True,
        clock=time.thread_time,
        close=idle.close,
    )
