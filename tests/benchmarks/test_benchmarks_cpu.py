"""The timings of the CPU: what they compare is the same work."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from twinstep.benchmarks.cpu import TorchTrainer, main
from twinstep.scenarios.plan import Plan
from twinstep.scenarios.trainers import ClassTrainer


def test_the_command_writes_ratios_with_quartiles(tmp_path: Path) -> None:
    file = tmp_path / "cpu.json"
    parts = ["--part", "update", "--part", "norm", "--numel", "4096", "--rounds", "2"]
    assert main([*parts, "--output", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["update"]["bf16_gradients"]["ratio"] > 0.0
    assert found["norm"].keys() >= {"float32", "float16", "bfloat16"}
    assert len(found["norm"]["bfloat16"]["share_quartiles"]) == 2


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_both_trainers_run_the_same_forward_and_backward(dtype: str) -> None:
    plan = Plan(optimizer="adam", dtype=dtype, rule="static", steps=1, held_out=1)
    ours, theirs = ClassTrainer(plan, "fast", torch.device("cpu")), TorchTrainer(plan)
    assert ours.learn() == [theirs.learn()]
    found = ours.wrapper.get_global_norm()
    assert math.isclose(found, theirs.norm, rel_tol=1e-6)
