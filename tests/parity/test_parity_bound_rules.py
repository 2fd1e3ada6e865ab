"""Rules of bounds: each encloses what an honest implementation may make of honest operands."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from twinstep.parity.laws import LAWS
from twinstep.parity.records.ledger import Status
from twinstep.parity.registry.engines import engine_named
from twinstep.parity.registry.kernels import Kernel, registrations
from twinstep.parity.runner.judge_cell import judge_cell
from twinstep.parity.runner.recipes import Effort

ROOT = Path(__file__).parents[2]
EFFORT = Effort(repros=None, shrink_seconds=0.0)


@pytest.fixture(scope="module")
def lions() -> Iterator[dict[str, Kernel]]:
    with registrations() as found:
        runpy.run_path(str(ROOT / "examples" / "lion_operation.py"))
    yield {row.name: replace(row, arithmetic="bounded", engines=("cpu",)) for row in found}


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(
    ("name", "status"), [("right_lion", Status.PASSED), ("wrong_lion", Status.FAILED)]
)
def test_a_step_by_signs_is_judged_as_bounded(
    lions: dict[str, Kernel], name: str, status: Status, dtype: str
) -> None:
    cell = judge_cell(lions[name], dtype, LAWS["value"], engine_named("cpu"), EFFORT)
    assert cell.status is status, cell.failure or cell.reason
