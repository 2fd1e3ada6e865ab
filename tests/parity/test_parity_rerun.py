"""A repro file is run before it is promised: always, after other calls, by chance, or not again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from twinstep.parity.cases.case import Case, Recipe
from twinstep.parity.cases.generate import generate
from twinstep.parity.laws import LAWS
from twinstep.parity.laws.base import Law
from twinstep.parity.laws.finding import Finding
from twinstep.parity.operations.operation import Operation
from twinstep.parity.operations.table import operation_named
from twinstep.parity.records.ledger import Cell, Status
from twinstep.parity.registry.engines import engine_named
from twinstep.parity.registry.kernels import Kernel
from twinstep.parity.runner import rerun
from twinstep.parity.runner.judge_cell import judge_cell
from twinstep.parity.runner.load_file import load_file
from twinstep.parity.runner.recipes import Effort
from twinstep.parity.runner.run_plan import PlanRunner
from twinstep.parity.runner.shrink import reference_keeps, shrunk

ADD = """
import os, random, sys
from twinstep.parity import register

calls = 0

@register("accumulate", name="mine", arithmetic="exact", dtypes=("bf16",), engines=("cpu",))
def mine(accumulators, grads):
    global calls
    calls += 1
    for a, g in zip(accumulators, grads):
        a.copy_(a.float() + g.float())
        {fault}
"""
WRONG = "a.add_(a.new_ones(()))"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No limit of time for a busy machine."""
    monkeypatch.setattr(rerun, "SEARCH", 600.0)


def judged(folder: Path, text: str, law: str = "value") -> Cell:
    file = folder / "kernel.py"
    file.write_text(text)
    (kernel,) = load_file(str(file)).kernels
    effort = Effort(examples=12, repros=str(folder / "parity_repros"), shrink_seconds=2.0)
    return judge_cell(kernel, "bf16", LAWS[law], engine_named("cpu"), effort)


def run(cell: Cell, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, cell.repro]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_a_fault_of_the_fifth_call_is_shown_after_the_calls_that_it_needs(tmp_path: Path) -> None:
    cell = judged(tmp_path, ADD.format(fault=f"calls > 4 and {WRONG}"))
    assert "again    fails only after 4 other calls, which the file makes first" in cell.failure
    done = run(cell, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "fails only after 4 other calls" in Path(cell.repro).read_text()


@pytest.mark.parametrize(
    ("when", "says"),
    [
        ("True", "the operation is applied more than once to the same data"),
        ("calls > 4", "depends on earlier calls: the same call alone, in a new process, is right"),
    ],
)
def test_a_cause_of_single_calls_is_named_where_one_call_alone_shows_it(
    tmp_path: Path, when: str, says: str
) -> None:
    cell = judged(tmp_path, ADD.format(fault=f"{when} and a.copy_(a.float() + g.float())"))
    assert cell.cause == says
    assert f"  cause    {says}\n" in cell.failure


EVERY_FOURTH = """
from pathlib import Path

def chance():
    count = Path({path!r})
    before = int(count.read_text()) if count.exists() else 0
    count.write_text(str(before + 1))
    return before % 4 == 3
"""


def test_a_fault_by_chance_is_counted_and_its_file_repeats_until_it_fails(tmp_path: Path) -> None:
    """The chance is that of a process which comes after others: every fourth call of all."""
    helper = EVERY_FOURTH.format(path=str(tmp_path / "count"))
    text = ADD.format(fault=f"a is accumulators[0] and chance() and {WRONG}")
    cell = judged(tmp_path, helper + text)
    assert "again    fails by chance, in about 75 of 300 runs" in cell.failure
    done = run(cell, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr


def test_a_fault_that_only_the_judge_sees_is_not_promised(tmp_path: Path) -> None:
    cell = judged(tmp_path, ADD.format(fault=f"'pytest' in sys.modules and {WRONG}"))
    assert cell.status is Status.FAILED
    assert "again    does not fail again alone" in cell.failure
    assert "repro " not in cell.failure
    assert not cell.repro
    assert not list((tmp_path / "parity_repros").glob("*.py"))


def test_a_kernel_that_kills_its_process_or_hangs_exits_with_1(tmp_path: Path) -> None:
    cell = judged(tmp_path, ADD.format(fault=WRONG))
    file = tmp_path / "kernel.py"
    file.write_text(ADD.format(fault="os.kill(os.getpid(), 9)"))
    died = run(cell, tmp_path)
    assert (died.returncode, "ends its process: signal 9" in died.stdout) == (1, True)
    file.write_text(ADD.format(fault="while True: pass"))
    short = Path(cell.repro).read_text().replace("LIMIT = 120", "LIMIT = 4")
    Path(cell.repro).write_text(short)
    hung = run(cell, tmp_path)
    assert (hung.returncode, "hangs: no return after 4 s" in hung.stdout) == (1, True)


FACTORY = """
def made(factor):
    def inner(accumulators, grads):
        for a, g in zip(accumulators, grads):
            a.copy_(a.float() + factor * g.float())
    return inner
"""
REGISTERS = """
from twinstep.parity import register
from beside_it import made

register("accumulate", name="odd name!", dtypes=("bf16",), engines=("cpu",))(made(2.0))
"""


def test_a_kernel_of_a_factory_in_a_neighbouring_module_is_loaded_from_what_registers_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    neighbour = tmp_path / "beside_it.py"
    neighbour.write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    cell = judged(tmp_path, REGISTERS)
    name = os.path.join("parity_repros", "repro_odd-name-_value_bf16.py")
    assert cell.failure.splitlines()[-1] == f"  repro    {sys.executable} {name}"
    assert (tmp_path / "parity_repros" / ".gitignore").read_text() == "*\n"
    assert run(cell, Path("/")).returncode == 1
    neighbour.unlink()
    lost = run(cell, tmp_path)
    assert lost.returncode == 4
    assert "cannot be loaded: ModuleNotFoundError: No module named 'beside_it'" in lost.stdout
    assert "Traceback" not in lost.stderr


def of_reference(operation: Operation) -> Kernel:
    """The reference as a kernel, which writes what it returns."""

    def function(*lists: object, **named: object) -> None:
        results = operation.reference(*lists, **named)
        places = {row.name: given for row, given in zip(operation.lists, lists, strict=True)}
        for name, result in zip(operation.writes, results, strict=True):
            target = (places | named)[name]
            targets = target if isinstance(target, list) else [target]
            for one, other in zip(
                targets, result if isinstance(result, list) else [result], strict=True
            ):
                one.copy_(other)

    return Kernel(
        name="the reference",
        operation=operation,
        function=function,
        arithmetic="exact",
        dtypes=tuple(operation.combinations),
        layouts=operation.layouts,
        engines=("cpu",),
        place="nowhere:0",
    )


SHRUNK = ("adamw_step", "mixed_step", "unscale", "global_norm", "update_scale_dynamic")


@pytest.mark.parametrize("name", SHRUNK)
def test_what_a_case_shrinks_to_accuses_no_right_kernel(name: str) -> None:
    """Even if every case fails, for any law: found_inf stays set and a planted inf stays there."""
    operation = operation_named(name, "test")
    kernel = of_reference(operation)
    runner = PlanRunner(kernel, engine_named("cpu"))
    combination = next(iter(operation.combinations))
    always = Finding(says="wrong", call=0, kind="value", name="nothing")
    options = {row.name: row.choices[0] for row in operation.options}
    recipe = Recipe(layout="list", sizes=(9, 3), seed=5, regime="ordinary", options=options)
    for law in (LAWS[law] for law in operation.laws if "cpu" in LAWS[law].engines):
        first = next(iter(law.vary(generate(operation, combination, recipe))), None)
        if first is None or law.claim or law.idle(operation, combination):
            continue

        def fair(case: Case, law: Law = law) -> bool:
            return reference_keeps(law.plan(case, "exact"))

        assert fair(first), law.name

        def search(candidate: Case, lists: bool = bool(operation.lists)) -> Finding | None:
            return always if candidate.numel or not lists else None

        case, _ = shrunk(first, always, search, 2.0, fair)
        assert runner.violation(law.plan(case, "exact")) is None, law.name
        if law.name == "skipped_step" and "found_inf" not in operation.writes:
            assert bool(case.controls["found_inf"] == 1)
