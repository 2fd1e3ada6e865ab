"""Tests of another project on replay: every kind of outcome is counted, and none twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.foreign.outcomes import Outcome, append, read
from tools.foreign.plugin import Record
from tools.source import ROOT

CONFTEST = """
import pytest

@pytest.fixture
def device():
    return "cuda"
"""
TESTS = """
import os
import time

import pytest
import torch
import triton
import triton.language as tl

assert torch.cuda.get_device_capability() == (9, 0)


@triton.jit
def double(x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, 2 * tl.load(x + at))


@triton.jit
def timed(x):
    tl.store(x, tl.extra.cuda.globaltimer())


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_right(size, device):
    x = torch.ones(16, device=device)
    double[(1,)](x, BLOCK=size)
    assert x.sum() == 16 + size


def test_wrong(device):
    x = torch.ones(16, device=device)
    double[(1,)](x, BLOCK=8)
    assert x.sum() == 32, "half of it"


def test_refused(device):
    timed[(1,)](torch.zeros(1, dtype=torch.int64, device=device))


def test_fault(device):
    double[(1,)](torch.ones(8, device=device), BLOCK=16)


def test_code():
    ptx = ""
    assert "wgmma" in ptx


def test_left_out():
    pytest.skip("only elsewhere")


def test_slow():
    try:
        time.sleep(60)
    except Exception:
        pass


def test_other():
    {}["key"]


def test_verdict():
    raise ValueError("5 elements mismatch")


def test_known():
    os._exit(5)
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Outcome], str, int]:
    """Outcomes by test, what was printed, and the exit code."""
    checkout = tmp_path_factory.mktemp("checkout")
    folder = checkout / "python" / "test" / "unit" / "language"
    folder.mkdir(parents=True)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_core.py").write_text(TESTS)
    file = checkout / "outcomes.jsonl"
    append(file, Outcome("passed", case="unit/language/test_core.py::test_known"))
    command = [sys.executable, "-m", "tools.foreign", str(checkout), "--files", "test_core"]
    command += ["--outcomes", str(file), "--jobs", "1", "--limit", "20"]
    # A run inside a worker of another would take itself for one.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    return {row.case.split("::")[1]: row for row in read(file)}, done.stdout, done.returncode


EXPECTED = {
    "test_wrong": ("wrong result", "half of it"),
    "test_refused": ("refused", "clock"),
    "test_fault": ("fault reported", "OutOfBounds"),
    "test_code": ("assertion about code", 'assert "wgmma" in ptx'),
    "test_left_out": ("skipped", "only elsewhere"),
    "test_slow": ("too slow", "TooSlow"),
    "test_other": ("other error", "KeyError"),
    "test_verdict": ("wrong result", "5 elements mismatch"),
    "test_known": ("passed", ""),
    **{f"test_right[{size}]": ("passed", "") for size in (1, 2, 4, 8, 16)},
}


def test_every_outcome_has_its_name_and_reason(
    outcomes: tuple[dict[str, Outcome], str, int],
) -> None:
    found, _, _ = outcomes
    assert {name: row.outcome for name, row in found.items()} == {
        name: outcome for name, (outcome, _) in EXPECTED.items()
    }
    for name, (_, reason) in EXPECTED.items():
        assert reason in found[name].reason, found[name]
    assert found["test_refused"].place.endswith("test_core.py:21")


def test_the_table_counts_them_and_a_wrong_result_is_exit_code_1(
    outcomes: tuple[dict[str, Outcome], str, int],
) -> None:
    _, printed, code = outcomes
    assert "14 of 14 cases" in printed
    assert "| passed |  | 6 |" in printed
    assert "| refused | clock | 1 |" in printed
    assert "wrong result: unit/language/test_core.py::test_wrong: AssertionError" in printed
    assert code == 1


def test_what_ends_its_process_is_a_crash(tmp_path: Path) -> None:
    file = tmp_path / "outcomes.jsonl"
    report = pytest.TestReport(
        "t.py::test_x", ("t.py", 1, "x"), {}, "failed", "worker died", "call"
    )
    Record(file).pytest_runtest_logreport(report)
    assert read(file) == [Outcome("crash", "worker died", case="t.py::test_x")]


def test_a_folder_without_tests_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.foreign", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "No tests of Triton at" in done.stderr
