"""Every kernel that can be timed here, under pytest-benchmark: a part of `make bench`.

    pytest -p pytest_benchmark.plugin twinstep/benchmarks/bench_kernels.py

A kernel is here by being registered. These are times of one process, with pytest-benchmark's own
table, JSON and `--benchmark-compare`; for ratios that can be trusted use `parity bench run`, which
takes turns and fresh processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import pytest
import torch

from twinstep.benchmarks.beside.rows import Group, groups_of, ours, subject_of
from twinstep.benchmarks.beside.subject import Shape
from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import Kernel, kernels

SHAPES = (Shape(1, 2**20), Shape(300, 256))
ROUNDS = 20


class Benchmark(Protocol):
    """pytest-benchmark's fixture, as far as it is used here."""

    group: str

    def pedantic(
        self, target: Callable[[], object], *, setup: Callable[[], object], rounds: int
    ) -> object:
        """Time a function in rounds, each after `setup`."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A row for every kernel and shape."""
    register_house()
    rows = [
        pytest.param(kernel, group, id=f"{kernel.name} {group.dtype} {group.shape}")
        for group in groups_of(kernels(), SHAPES)
        for kernel in ours(kernels(), group)
    ]
    metafunc.parametrize(("kernel", "group"), rows)


def test_time(benchmark: Benchmark, kernel: Kernel, group: Group) -> None:
    """Time of one call; its arguments are what they were at first in every round."""
    subject = subject_of(kernel, group)
    subject.settle()

    def ready() -> None:
        subject.make_ready()
        if subject.device.type == "cuda":
            torch.cuda.synchronize()

    def call() -> None:
        subject.call()
        if subject.device.type == "cuda":
            torch.cuda.synchronize()

    benchmark.group = str(group)
    benchmark.pedantic(call, setup=ready, rounds=ROUNDS)
