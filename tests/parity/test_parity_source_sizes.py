"""Numbers in a kernel's source are sizes that it is tried at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.parity.test_parity_laws import Tensors, accumulate, judged, kernel_of
from twinstep.parity.cases.source_sizes import source_sizes
from twinstep.parity.records.ledger import Status

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


def test_an_element_left_over_behind_a_chunk_of_any_length_is_missed() -> None:
    def chunked(accumulators: Tensors, grads: Tensors) -> None:
        for a, g in zip(accumulators, grads, strict=True):
            total, grad, n = a.reshape(-1), g.reshape(-1), a.numel()
            for start in range(0, n if n <= CHUNK else n - 1, CHUNK):
                accumulate([total[start : start + CHUNK]], [grad[start : start + CHUNK]])

    kernel = kernel_of("accumulate", chunked)
    assert judged(kernel, "boundary_sizes").status is Status.PASSED
    cell = judged(replace(kernel, place=f"{__file__}:1"), "boundary_sizes")
    assert cell.status is Status.FAILED
    assert f"[{CHUNK}]" in cell.failure or f"{CHUNK + 1}" in cell.failure
