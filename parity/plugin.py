"""pytest plugin for the suites of users: `pytest -p parity.plugin`.

    def test_my_adamw(parity_check):
        parity_check(my_adamw)

With `--parity`, every file given on the command line that registers kernels is collected as well,
one test for each kernel, dtype combination and law.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from twinstep.parity.laws import LAWS
from twinstep.parity.records.ledger import Status
from twinstep.parity.registry.engines import engine_for, running
from twinstep.parity.registry.kernels import Kernel
from twinstep.parity.runner.check import Verdict, check
from twinstep.parity.runner.judge_cell import Effort, judge_cell
from twinstep.parity.runner.load_file import load_file
from twinstep.parity.sequences.judge import LAW, judge_twin, twin_engine
from twinstep.parity.sequences.registry import Twin
from twinstep.parity.sequences.session import effort_of

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
    asked = parent.config.getoption("parity") and file_path.suffix == ".py"
    if not asked or "parity" not in file_path.read_text():
        return None
    return KernelFile.from_parent(parent, path=file_path)


class KernelFile(pytest.File):
    """A file that registers kernels."""

    def collect(self) -> Iterator[pytest.Item]:
        """One test for each cell that a kernel or an optimizer claims."""
        loaded = load_file(str(self.path))
        for twin in loaded.twins:
            for dtype in twin.dtypes:
                sequences = TwinItem.from_parent(self, name=f"{twin.name}[{dtype}, {LAW}]")
                sequences.cell = (twin, dtype)
                yield sequences
        for kernel in loaded.kernels:
            for dtype in kernel.dtypes:
                for law in kernel.operation.laws:
                    item = CellItem.from_parent(self, name=f"{kernel.name}[{dtype}, {law}]")
                    item.cell = (kernel, dtype, law)
                    yield item


class CellItem(pytest.Item):
    """One cell of the ledger as a test."""

    cell: tuple[Kernel, str, str]

    def runtest(self) -> None:
        """Judge the cell."""
        kernel, dtype, law = self.cell
        engine = engine_for(kernel)
        effort = Effort(examples=int(self.config.getoption("parity_examples")), repros=None)
        with running(engine):
            result = judge_cell(kernel, dtype, LAWS[law], engine, effort)
        if result.status is Status.FAILED:
            pytest.fail(result.failure, pytrace=False)
        if result.status is Status.SKIPPED:
            pytest.skip(result.reason)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Place of the kernel, for the report."""
        return self.path, 0, self.name


class TwinItem(pytest.Item):
    """A whole optimizer on one dtype as a test."""

    cell: tuple[Twin, str]

    def runtest(self) -> None:
        """Drive it."""
        twin, dtype = self.cell
        examples = int(self.config.getoption("parity_examples"))
        result = judge_twin(twin, dtype, twin_engine(twin), effort_of(examples, None, None))
        if result.status is Status.FAILED:
            pytest.fail(result.failure, pytrace=False)
        if result.status is Status.SKIPPED:
            pytest.skip(result.reason)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Place of the class, for the report."""
        return self.path, 0, self.name
