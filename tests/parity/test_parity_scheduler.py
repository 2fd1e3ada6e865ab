"""Several processes give the same ledger as one, and survive a kernel that kills its own."""

from __future__ import annotations

from pathlib import Path

from twinstep.parity.prove.rows import rows_of
from twinstep.parity.records.ledger import Ledger, Status
from twinstep.parity.registry.selection import Selection
from twinstep.parity.runner.load_file import load_file
from twinstep.parity.runner.recipes import Effort
from twinstep.parity.runner.scheduler import jobs_for, run
from twinstep.parity.runner.session import beside_optimizers, planned
from twinstep.parity.runner.source import Source

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
    return run(source, selection, QUICK, jobs=jobs)


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
    for jobs in (1, 2):
        ledger = judged(file, ("right", "deadly"), jobs)
        ended = {(key.kernel, key.law): cell for key, cell in ledger.cells.items()}
        assert {ended["right", law].status for law in LAWS} == {Status.PASSED}
        assert ended["deadly", "value"].status is Status.FAILED
        assert "the kernel crashes its process with SIGKILL" in ended["deadly", "value"].failure
        assert ledger.missing() == []
        if jobs == 1:
            assert ended["deadly", "repeat"].status is Status.CANNOT_JUDGE
            assert "not called again after `value`" in ended["deadly", "repeat"].reason


def test_names_of_optimizers_alone_select_no_kernel_and_are_known() -> None:
    opened = Source().open()
    chosen = Selection(names=("fast.ZeroOptimizer",), dtypes=("mixed",))
    assert [task.key.kernel for task in planned(chosen, opened.kernels, opened.optimizers)] == [
        "fast.ZeroOptimizer"
    ]
    assert not rows_of(opened.kernels, beside_optimizers(chosen, opened.optimizers))


def test_little_work_is_done_in_one_process(tmp_path: Path) -> None:
    file = tmp_path / "kernels.py"
    file.write_text(KERNELS)
    tasks = planned(Selection(), load_file(str(file)).kernels)
    assert jobs_for(tasks, None) == 1
    assert jobs_for(tasks, 3) == 3
    assert jobs_for(tasks * 10, None) >= 1
