"""The timings of the CPU: what they compare is the same work."""

from __future__ import annotations

import json
from pathlib import Path

from twinstep.benchmarks.cpu import main


def test_the_command_writes_ratios_with_quartiles(tmp_path: Path) -> None:
    file = tmp_path / "cpu.json"
    parts = ["--part", "update", "--part", "norm", "--numel", "4096", "--rounds", "2"]
    assert main([*parts, "--output", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["update"]["bf16_gradients"]["ratio"] > 0.0
    assert found["norm"].keys() >= {"float32", "float16", "bfloat16"}
    assert len(found["norm"]["bfloat16"]["share_quartiles"]) == 2
