"""The comparison of offload runs, and both sides do one and the same step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from twinstep.benchmarks.offload import Ours, Theirs, main


def test_both_sides_take_the_same_step() -> None:
    grads = (torch.randn(5000, generator=torch.Generator().manual_seed(1)) / 100).bfloat16()
    ours, theirs = Ours(grads), Theirs(grads, cpu_adam=False)
    for _ in range(3):
        ours.step(lambda _: None)
        theirs.step(lambda _: None)
    torch.testing.assert_close(ours.master, theirs.master.detach(), rtol=1e-4, atol=1e-6)
    assert torch.equal(ours.weights, ours.master.bfloat16())


def test_the_command_writes_ratios_and_where_they_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results" / "offload.json"
    assert main(["--numel", "4096", "--rounds", "2", "--output", str(file)]) == 0
    found = json.loads(file.read_text())
    assert json.loads(capsys.readouterr().out) == found
    assert {"torch", "processor", "cores", "theirs", "threads"} <= found.keys()
    assert found["step"]["ratio"] > 0.0
    assert found["beside_a_gpu"]["theirs_ms"] <= found["step"]["theirs_ms"]
