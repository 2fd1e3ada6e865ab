"""Failures shrink to one tensor, one element and plain numbers; the repro file stands alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from twinstep.parity.cases.case import Recipe
from twinstep.parity.cases.generate import generate
from twinstep.parity.laws import LAWS
from twinstep.parity.laws.finding import Finding
from twinstep.parity.operations.table import operation_named
from twinstep.parity.records.ledger import Cell, Status
from twinstep.parity.registry.engines import engine_named, running
from twinstep.parity.runner.judge_cell import judge_cell
from twinstep.parity.runner.load_file import load_file
from twinstep.parity.runner.recipes import Effort
from twinstep.parity.runner.shrink import shrunk

KERNEL = """
from twinstep.parity import register

@register("accumulate", name="mine", arithmetic="{arithmetic}", dtypes=("bf16",), engines=("cpu",))
def mine(accumulators, grads):
    for a, g in zip(accumulators, grads):
        {body}
"""
RIGHT = "a.copy_(a.float() + g.float())"
BUGS = {
    "value": "a.copy_(a.float() + 2 * g.float())",
    "nothing_else_written": "a.add_(g.float()); g.zero_()",
    "boundary_sizes": "n = a.numel() // 4 * 4; a.view(-1)[:n] += g.reshape(-1)[:n].float()",
    "permutation": "a.add_(g.float() if a is accumulators[0] else g.float() + 1)",
    "non_finite": "a.add_(g.float().nan_to_num(0.0))",
}


def judged(folder: Path, law: str, body: str, arithmetic: str = "exact") -> Cell:
    file = folder / "kernel.py"
    file.write_text(KERNEL.format(body=body, arithmetic=arithmetic))
    (kernel,) = load_file(str(file)).kernels
    effort = Effort(examples=6, repros=str(folder), shrink_seconds=3.0)
    return judge_cell(kernel, "bf16", LAWS[law], engine_named("cpu"), effort)


def test_a_wrong_element_shrinks_to_one_element(tmp_path: Path) -> None:
    cell = judged(tmp_path, "value", BUGS["value"])
    assert cell.status is Status.FAILED
    assert "1 tensor, 1 element (shrunk from" in cell.failure
    assert "inputs   accumulators 0  0x00000000   grads 1  0x3f80" in cell.failure
    assert "got      2  0x40000000" in cell.failure
    assert "want     1  0x3f800000" in cell.failure


@pytest.mark.parametrize(
    ("law", "arithmetic"), [("value", "bounded"), *((law, "exact") for law in BUGS)]
)
def test_repro_file_fails_while_the_bug_is_there_and_passes_when_it_is_fixed(
    tmp_path: Path, law: str, arithmetic: str
) -> None:
    cell = judged(tmp_path, law, BUGS[law], arithmetic)
    assert cell.status is Status.FAILED
    repro = Path(cell.repro)
    assert repro.parent == tmp_path
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(repro.resolve())]
        return subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=False)

    broken = run()
    assert broken.returncode == 1, broken.stderr
    assert "the law is broken" in broken.stdout
    fixed = KERNEL.format(body=RIGHT, arithmetic=arithmetic)
    (tmp_path / "kernel.py").write_text(fixed)
    kept = run()
    assert kept.returncode == 0, kept.stdout + kept.stderr


def test_repro_needs_nothing_of_ours(tmp_path: Path) -> None:
    cell = judged(tmp_path, "value", BUGS["value"])
    text = Path(cell.repro).read_text()
    imports = {line for line in text.splitlines() if line.startswith(("import ", "from "))}
    standard = {"contextlib", "importlib.util", "math", "os", "subprocess", "sys", "types"}
    names = {*standard, "torch"}
    assert imports == {f"import {name}" for name in names}


def test_a_finding_in_a_tensor_that_only_another_call_has_does_not_stop_shrinking() -> None:
    operation = operation_named("accumulate", "test")
    case = generate(operation, "bf16", Recipe(layout="list", sizes=(40, 3), seed=1))
    beyond = Finding(says="differs", call=1, name="accumulators", index=5, place=0)
    smallest, finding = shrunk(case, beyond, lambda candidate: beyond, 5.0, lambda case: True)
    assert finding is beyond
    assert smallest.numel <= 1


LIFTED = """
import triton
import triton.language as tl
from twinstep.parity import register

@triton.jit
def add(a, g, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    total = tl.load(a + at, mask=here) + tl.load(g + at, mask=here).to(tl.float32) * {factor}
    tl.store(a + at, total, mask=here)

@register("accumulate", name="mine", dtypes=("bf16",))
def mine(accumulators, grads):
    for a, g in zip(accumulators, grads):
        if a.numel():
            add[((a.numel() + 127) // 128,)](a, g, a.numel(), BLOCK=128)
"""


def test_a_wrong_formula_shrinks_and_its_repro_lifts_the_kernel_again(tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(LIFTED.format(factor="1.0000001"))
    (kernel,) = load_file(str(file)).kernels
    effort = Effort(examples=6, repros=str(tmp_path))
    engine = engine_named("replay")
    with running(engine):
        cell = judge_cell(kernel, "bf16", LAWS["formula"], engine, effort)
    assert cell.status is Status.FAILED
    assert "without any rounding" in cell.failure
    assert "1 tensor, 1 element (shrunk from" in cell.failure

    def repro() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, cell.repro]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    broken = repro()
    assert broken.returncode == 1, broken.stderr
    assert "without any rounding" in broken.stdout
    file.write_text(LIFTED.format(factor="1.0"))
    kept = repro()
    assert kept.returncode == 0, kept.stdout + kept.stderr
