"""pytest plugin for the suites of users: `pytest -p parity.plugin`.

    def test_my_adamw(parity_check):
        parity_check(my_adamw)

With `--parity`, every file given on the command line that registers kernels is collected as well,
one test for each kernel, dtype combination and law.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from twinstep.parity.records.ledger import Status
from twinstep.parity.registry.kernels import Kernel
from twinstep.parity.registry.selection import Selection
from twinstep.parity.runner.check import Verdict, check
from twinstep.parity.runner.recipes import Effort
from twinstep.parity.runner.session import Session, Task, planned
from twinstep.parity.runner.source import Source

Checker = Callable[..., Verdict]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--parity` and `--parity-examples`."""
    group = parser.getgroup("parity")
    group.addoption(
        "--parity", action="store_true", help="collect the kernels that the given files register"
    )
    group.addoption(
        "--parity-examples", type=int, default=Effort.examples, help="cases for the value law"
    )


@pytest.fixture
def parity_check(pytestconfig: pytest.Config) -> Checker:
    """Judge a registered kernel; fails the test with the failure texts if a law is broken."""
    examples = int(pytestconfig.getoption("parity_examples"))

    def judged(kernel: Kernel | Callable[..., object], **options: object) -> Verdict:
        verdict = check(kernel, **{"examples": examples, **options})  # type: ignore[arg-type]
        if not verdict:
            pytest.fail(str(verdict), pytrace=False)
        return verdict

    return judged


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect a file that registers kernels, if `--parity` asks for it."""
    return KernelFile.from_parent(parent, path=file_path) if _asked(file_path, parent) else None


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Collector | None:
    """Leave a file to the judge that pytest takes for tests because the command line names it.

    The judge imports it in another process, whose end pytest survives.
    """
    patterns = parent.config.getini("python_files")
    tests = any(module_path.match(pattern) for pattern in patterns)
    if tests or not _asked(module_path, parent):
        return None
    return NoTests.from_parent(parent, path=module_path)


def _asked(path: Path, parent: pytest.Collector) -> bool:
    """True for a file that may register kernels, if `--parity` asks for it."""
    python = path.suffix == ".py"
    return bool(parent.config.getoption("parity") and python and "parity" in path.read_text())


class NoTests(pytest.File):
    """A file without tests of pytest's own."""

    def collect(self) -> Iterator[pytest.Item]:
        """Nothing."""
        return iter(())


class KernelFile(pytest.File):
    """A file that registers kernels."""

    def collect(self) -> Iterator[pytest.Item]:
        """One test for each cell that a kernel or an optimizer claims."""
        opened = Source(file=str(self.path)).open()
        examples = int(self.config.getoption("parity_examples"))
        effort = Effort(examples=examples, repros=None)
        session = Session(effort=effort, subject=opened.subject)
        if opened.subject is not None:
            self.config.add_cleanup(opened.subject.close)
        for task in planned(Selection(), opened.kernels, opened.optimizers):
            key = task.key
            if task.claimed:
                name = f"{key.kernel}[{key.dtype}, {key.law}]"
                yield CellItem.from_parent(self, name=name, cell=task, judge=session)


class CellItem(pytest.Item):
    """One cell of the ledger as a test."""

    def __init__(self, *, cell: Task, judge: Session, **rest: Any) -> None:
        super().__init__(**rest)
        self.cell, self.judge = cell, judge

    def runtest(self) -> None:
        """Judge the cell."""
        result = self.judge.cell(self.cell)
        if result.status in (Status.FAILED, Status.CANNOT_JUDGE):
            pytest.fail(result.failure or f"cannot judge: {result.reason}", pytrace=False)
        if result.status is Status.SKIPPED:
            pytest.skip(result.reason)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Place of the kernel or class, for the report."""
        return self.path, 0, self.name
