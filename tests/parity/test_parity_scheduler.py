"""Several processes give the same ledger as one, and survive a kernel that kills its own."""

from __future__ import annotations

from pathlib import Path

from twinstep.parity.records.ledger import Ledger, Status
from twinstep.parity.registry.selection import Selection
from twinstep.parity.runner.check import load
from twinstep.parity.runner.judge_cell import Effort
from twinstep.parity.runner.judge_kernels import tasks
from twinstep.parity.runner.scheduler import Source, jobs_for, run

KERNELS = """
import os, signal
from twinstep.parity import register

@register("accumulate", name="right", dtypes=("bf16",))
def right(accumulators, grads):
    for a, g in zip(accumulators, grads):
        a.add_(g.float())

@register("accumulate", name="deadly", dtypes=("bf16",))
def deadly(accumulators, grads):
    os.kill(os.getpid(), signal.SIGKILL)
"""
LAWS = ("value", "repeat")
QUICK = Effort(examples=2, repros=None, shrink_seconds=0.0)


def judged(file: Path, names: tuple[str, ...], jobs: int) -> Ledger:
    selection = Selection(names=names, laws=LAWS, dtypes=("bf16",))
    source = Source(file=str(file))
    return run(source, selection, QUICK, known=load(str(file)), jobs=jobs)


def test_two_processes_give_the_ledger_of_one(tmp_path: Path) -> None:
    file = tmp_path / "kernels.py"
    file.write_text(KERNELS)
    one, two = (judged(file, ("right",), jobs) for jobs in (1, 2))
    assert list(one.cells) == list(two.cells) == list(one.declared)
    pairs = zip(one.cells.values(), two.cells.values(), strict=True)
    assert all((a.status, a.calls, a.worst) == (b.status, b.calls, b.worst) for a, b in pairs)


def test_a_kernel_that_kills_its_process_breaks_its_own_cells_only(tmp_path: Path) -> None:
    file = tmp_path / "kernels.py"
    file.write_text(KERNELS)
    ledger = judged(file, ("right", "deadly"), 2)
    ended = {(key.kernel, key.law): cell.status for key, cell in ledger.cells.items()}
    assert {ended["right", law] for law in LAWS} == {Status.PASSED}
    assert {ended["deadly", law] for law in LAWS} == {Status.FAILED}
    assert all("killed its process" in cell.failure for cell in ledger.with_status(Status.FAILED))
    assert ledger.missing() == []


def test_little_work_is_done_in_one_process(tmp_path: Path) -> None:
    file = tmp_path / "kernels.py"
    file.write_text(KERNELS)
    planned = tasks(Selection(), load(str(file)))
    assert jobs_for(planned, None) == 1
    assert jobs_for(planned, 3) == 3
    assert jobs_for(planned * 10, None) >= 1
