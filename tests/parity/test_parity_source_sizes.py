"""Numbers in a kernel's source are sizes that it is tried at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from twinstep.parity.cases.source_sizes import source_sizes
from twinstep.parity.laws import LAWS
from twinstep.parity.operations.table import operation_named
from twinstep.parity.records.ledger import Status
from twinstep.parity.registry.engines import engine_named
from twinstep.parity.registry.kernels import Kernel
from twinstep.parity.runner.judge_cell import judge_cell
from twinstep.parity.runner.recipes import Effort

QUICK = Effort(examples=6, repros=None, shrink_seconds=1.0)
CHUNK = 11 * 1024 + 7


@pytest.mark.parametrize(
    ("source", "sizes"),
    [
        ("A = 1 << 10\nB = A * 2 - 1\n", {1025, 2048, 2049}),
        ("def f(n):\n    return n // (3 * 50)\n", {151, 2501}),
        ("A = 2**40 + 5 + 1.5\nB = 'x' * 100\nC = 1 << 2**20\n", {101, 501}),
        ("A = 63, -64, True\n", {65, 3970, 4033, 4097}),
        ("A = (", set()),
    ],
)
def test_sizes_are_one_above_numbers_and_products(
    tmp_path: Path, source: str, sizes: set[int]
) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(source)
    assert sizes <= set(source_sizes(file, 1 << 19))
    assert bool(sizes) == bool(source_sizes(file, 1 << 19))
    assert sum(source_sizes(file, 3000)) <= 3000


def test_what_cannot_be_read_suggests_nothing(tmp_path: Path) -> None:
    assert source_sizes(tmp_path / "none.py", 1 << 19) == ()
    assert source_sizes(tmp_path, 1 << 19) == ()


def chunked(accumulators: list[Tensor], grads: list[Tensor]) -> None:
    """Right but for one element behind a whole chunk."""
    for a, g in zip(accumulators, grads, strict=True):
        total, grad, n = a.reshape(-1), g.reshape(-1), a.numel()
        for start in range(0, n if n <= CHUNK else n - 1, CHUNK):
            total[start : start + CHUNK].add_(grad[start : start + CHUNK])


def test_an_element_left_over_behind_a_chunk_of_any_length_is_missed() -> None:
    contract = operation_named("accumulate", "test")
    kernel = Kernel(
        name="chunked",
        operation=contract,
        function=chunked,
        arithmetic="bounded",
        dtypes=("fp32",),
        layouts=contract.layouts,
        engines=("cpu",),
        place="no file:1",
    )
    law, cpu = LAWS["boundary_sizes"], engine_named("cpu")
    assert judge_cell(kernel, "fp32", law, cpu, QUICK).status is Status.PASSED
    cell = judge_cell(replace(kernel, place=f"{__file__}:1"), "fp32", law, cpu, QUICK)
    assert cell.status is Status.FAILED
    assert f"[{CHUNK}]" in cell.failure or f"{CHUNK + 1}" in cell.failure
