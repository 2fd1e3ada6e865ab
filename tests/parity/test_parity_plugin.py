"""The pytest plugin, the call from a program, and every example of the documentation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from twinstep import parity
from twinstep.parity.records.errors import UsageError
from twinstep.parity.registry.kernels import register, registrations
from twinstep.replay.cuda import nvrtc

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guide" / "adding-a-kernel.md"
EXAMPLES = dict(re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL))
WRONG = """
from twinstep.parity import register

@register("accumulate", dtypes=("bf16",))
def wrong(accumulators, grads):
    for a, g in zip(accumulators, grads):
        a.sub_(g.float())
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in EXAMPLES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_page_has_its_examples() -> None:
    expected = ["my_adamw.py", "my_triton_adamw.py", "my_cuda_adamw.py", "my_cpp_accumulate.py"]
    expected += ["test_my_adamw.py", "test_my_adamw_cases.py", "judge_my_adamw.py"]
    assert list(EXAMPLES) == expected


def test_triton_example_keeps_every_law(folder: Path) -> None:
    name = "my_triton_adamw.py"
    done = run(folder, "-m", "twinstep.parity", "check", name, "--quick", "--dtype", "bf16")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing() or "installed")
def test_cuda_example_keeps_its_values_and_a_wrong_one_does_not(folder: Path) -> None:
    name, laws = "my_cuda_adamw.py", ("--law", "value", "--jobs", "1")
    command = ("-m", "twinstep.parity", "check", name, "--quick", "--dtype", "bf16-pure", *laws)
    done = run(folder, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "my_cuda_adamw  replay" in done.stdout
    text = EXAMPLES[name]
    assert "c2 * h * h" in text
    (folder / name).write_text(text.replace("c2 * h * h", "c2 * h"))
    done = run(folder, *command)
    assert done.returncode == 1, done.stdout + done.stderr
    # A root of less than nothing is further off than the moment that it is of.
    assert "breaks `value`: params" in done.stdout
    assert "in exp_avg_sqs" in done.stdout


def test_cpp_example_keeps_every_law_and_a_wrong_one_does_not(folder: Path) -> None:
    name = "my_cpp_accumulate.py"
    command = ("-m", "twinstep.parity", "check", name, "--quick", "--jobs", "1")
    done = run(folder, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "my_cpp_accumulate  cpu" in done.stdout
    (folder / name).write_text(EXAMPLES[name].replace("sums[i] + ", "sums[i] - "))
    done = run(folder, *command)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "breaks `value`" in done.stdout


def test_example_test_and_example_program_pass(folder: Path) -> None:
    kernel = folder / "my_adamw.py"
    kernel.write_text(EXAMPLES[kernel.name].replace('("fp16", "bf16", "fp32")', '("bf16",)'))
    for name in ("judge_my_adamw.py", "test_my_adamw.py"):
        assert "examples=4" in EXAMPLES[name]
        (folder / name).write_text(EXAMPLES[name].replace("examples=4", "examples=1"))
    done = run(folder, "judge_my_adamw.py")
    assert re.search(r"all laws kept in \d\d cells", done.stdout), done.stdout + done.stderr
    tests = ("test_my_adamw.py", "test_my_adamw_cases.py")
    done = run(folder, "-m", "pytest", "-q", "-p", "twinstep.parity.plugin", *tests)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_plugin_collects_one_test_for_each_cell_and_fails_the_wrong_ones(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    command = ("-m", "pytest", "-q", "-p", "twinstep.parity.plugin", "--parity", "wrong.py")
    done = run(tmp_path, *command, "--parity-examples", "4")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "breaks `value`" in done.stdout
    assert "8 failed, 6 passed, 3 skipped" in done.stdout


def test_without_the_flag_nothing_is_collected(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    done = run(tmp_path, "-m", "pytest", "-q", "-p", "twinstep.parity.plugin", "wrong.py")
    assert done.returncode == 5, done.stdout + done.stderr


def right(accumulators: list[object], grads: list[object]) -> None:
    for a, g in zip(accumulators, grads, strict=True):
        a.add_(g.float())  # type: ignore[attr-defined]


def test_check_from_a_program_gives_a_verdict() -> None:
    with registrations():
        register("accumulate", dtypes=("bf16",))(right)
        verdict = parity.check(right, examples=3)
        assert verdict.passed
        assert verdict
        assert verdict.failures() == []
        assert str(verdict) == "all laws kept in 11 cells"


def test_check_of_an_unregistered_function_says_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"right is not registered; decorate it"):
        parity.check(right)
