"""Named scenarios under torchrun: ranks that are processes keep the laws of simulated ones."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers.waiting import finished
from twinstep import scenarios
from twinstep.scenarios.trace import first_difference, read

pytestmark = pytest.mark.skipif(
    not dist.is_gloo_available(), reason="this torch was built without gloo"
)


def test_two_processes_have_the_trace_of_two_simulated_ranks(tmp_path: Path) -> None:
    words = ["nan_on_one_rank", "--side", "fast", "--steps", "40"]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = finished(
        [*run, "-m", "twinstep.scenarios", *words, "--out", str(tmp_path / "real")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    assert "ranks: 2 processes, by gloo" in ended.stdout
    assert ended.stdout.count("holds  ") >= 7
    assert "BROKEN" not in ended.stdout
    out = ["--ranks", "2", "--out", str(tmp_path / "simulated")]
    assert scenarios.main([*words, *out]) == 0
    real, simulated = (
        read(tmp_path / kind / "nan_on_one_rank.jsonl")[0] for kind in ("real", "simulated")
    )
    assert real.skipped == [7, 19, 20]
    assert first_difference(real, simulated) is None


def test_what_torchrun_cannot_run_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert scenarios.main(["rank_failure"]) == 2
    said = capsys.readouterr().err
    assert "rank_failure ends ranks and starts others: run it without torchrun" in said
    assert scenarios.main(["nan_on_one_rank", "--ranks", "2"]) == 2
    assert "ranks=2, but torchrun has started 4 [--ranks]" in capsys.readouterr().err
