"""A launcher that catches what a launch raises, and goes on in torch, hides nothing by that."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

import twinstep.replay
from tests.helpers.command import parity
from twinstep.parity.proof.corpus import harmless_launches, wrong_triton
from twinstep.parity.proof.corpus.judged import judged
from twinstep.parity.proof.corpus.launch_kernels import (
    accumulate_kernel,
    uncompiled_kernel,
    unmasked_kernel,
)
from twinstep.parity.proof.corpus.optimizers import Optimizer, twin_of
from twinstep.parity.records.ledger import Cell, Ledger, Status
from twinstep.parity.registry.engines import engine_named
from twinstep.parity.runner.recipes import Effort
from twinstep.parity.sequences.judge import TwinEffort, judge_twin
from twinstep.reference.optimizers.fused_adam import FusedAdam, ParamGroup
from twinstep.replay.cuda.nvrtc import cuda_kernel, missing
from twinstep.replay.errors import OutOfBounds, ReplayError
from twinstep.replay.launch.record import fates

EFFORT = Effort(examples=4, shrink_seconds=0.0, repros=None)
WRONG = {entry.name: entry for entry in wrong_triton.SHELF}
RIGHT = {variant.name: variant for variant in harmless_launches.SHELF}

FILE = """
from twinstep.parity import register

try:
    import triton_of_another_machine as triton
except ImportError:
    triton = None


@register("accumulate", dtypes=("fp16",), engines=("replay",))
def in_torch(accumulators, grads):
    for a, g in zip(accumulators, grads):
        if triton is None:
            a.add_(g)
"""


def failed(ledger: Ledger, law: str) -> Cell:
    (cell,) = [cell for cell in ledger.with_status(Status.FAILED) if cell.key.law == law]
    return cell


def test_an_access_out_of_bounds_is_told_though_it_was_caught() -> None:
    ledger = judged(WRONG["store_past_the_end_caught"], laws=("value", "race_free"), effort=EFFORT)
    says = failed(ledger, "value").failure
    assert "launch of `unmasked_kernel` raised OutOfBounds in " in says
    assert "calls, and the kernel went on: read of " in says
    assert "launch_kernels.py:" in says
    assert failed(ledger, "race_free").kind == "out of bounds"


def test_a_kernel_that_does_not_compile_is_told_and_never_called_replay() -> None:
    ledger = judged(WRONG["error_of_the_compiler_caught"], laws=("value",), effort=EFFORT)
    cell = failed(ledger, "value")
    assert "raised CompilationError in 1 of 1 calls" in cell.failure
    assert ", cpu] breaks" in cell.failure
    assert (cell.key.engine, cell.engine, cell.record()["engine"]) == ("replay", "cpu", "cpu")


def test_a_configuration_that_does_not_fit_may_be_caught() -> None:
    ledger = judged(RIGHT["triton_where_there_is_a_gpu"], laws=("value",), effort=EFFORT)
    assert [cell.engine for cell in ledger.with_status(Status.PASSED)] == ["replay"]


def test_a_row_without_a_launch_is_one_of_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, found = tmp_path / "kernel.py", tmp_path / "found.json"
    file.write_text(FILE)
    laws = ("--law", "value", "--law", "race_free", "--examples", "4", "--jobs", "1")
    assert parity("check", str(file), *laws, "--json", str(found)) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "note no launch completed on fp16: the CPU did the work" in out
    cells = {row["law"]: row for row in json.loads(found.read_text())["cells"] if row["calls"]}
    assert (cells["value"]["engine"], cells["value"]["status"]) == ("cpu", "passed")
    assert (cells["race_free"]["engine"], cells["race_free"]["status"]) == ("cpu", "skipped")


class FallsBack(FusedAdam):
    """Tries a kernel first, and steps in torch whatever comes of it."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        for param in params:
            try:
                unmasked_kernel[(1,)](param.detach(), param.detach(), 0, BLOCK=1 << 16)
            except Exception as error:
                self._why = str(error)
        super()._step_group(group, params)


def test_a_class_that_falls_back_is_told() -> None:
    row = Optimizer(cls=FallsBack, says="Falls back.", dtypes=("bf16",), private=("_why",))
    twin = replace(twin_of(row), engines=("replay",), triton=True)
    effort = TwinEffort(sequences=2, repros=None, shrunk_by=20)
    cell = judge_twin(twin, "bf16", engine_named("replay"), effort)
    assert cell.status is Status.FAILED
    assert "launch of `unmasked_kernel` raised it, and the class went on" in cell.failure
    assert cell.engine == "cpu"


def test_launches_end_in_one_record_whoever_catches_what_they_raise() -> None:
    a, g = torch.zeros(100), torch.ones(100, dtype=torch.bfloat16)
    twinstep.replay.activate()
    try:
        with fates() as found:
            accumulate_kernel[(1,)](a, g, 100, BLOCK=128)
            with pytest.raises(OutOfBounds):
                unmasked_kernel[(1,)](a, g, 100, BLOCK=128)
            with pytest.raises(triton.CompilationError):
                uncompiled_kernel[(1,)](a, g, 100, BLOCK=128)
            with pytest.raises(OutOfResources):
                accumulate_kernel[(1,)](a, g, 100, BLOCK=128, num_warps=64)
            with pytest.raises(KeyError):
                accumulate_kernel[(1,)](a, g, 100, BLOCK=128, no_such_option=1)
            with pytest.raises(ReplayError, match="NVRTC"):
                cuda_kernel("not C++", "nothing")
    finally:
        twinstep.replay.deactivate()
    assert found.completed == 1
    assert [(name, type(error).__name__) for name, error in found.raised] == [
        ("unmasked_kernel", "OutOfBounds"),
        ("uncompiled_kernel", "CompilationError"),
        ("nothing", "ReplayError" if not missing() else "CannotReplay"),
    ]
