"""A pytest plugin: its process gives cases to others (`worker`) and writes their outcomes down."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tools.foreign.outcomes import BAD, Outcome, append, read, table


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options that `python -m tools.foreign` passes."""
    group = parser.getgroup("foreign")
    group.addoption("--outcomes", type=Path, help="File to add outcomes to.")
    group.addoption("--known", type=int, default=0, help="Lines of it whose cases do not run.")
    group.addoption("--limit", type=float, help="Seconds for each case.")
    group.addoption("--seconds", type=float, help="Seconds for all.")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Take one of the two parts."""
    part: object = Record(config.getoption("--outcomes"))
    if "PYTEST_XDIST_WORKER" in os.environ:
        from tools.foreign.worker import Worker

        part = Worker()
    config.pluginmanager.register(part)


class Record:
    """Outcomes as they come in, and their table at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cases: set[str] = set()
        self.absent: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a case down when it is decided."""
        if report.when in ("setup", "teardown") and report.passed:
            return
        attached = [value for name, value in report.user_properties if name == "outcome"]
        found = Outcome("crash", str(report.longrepr))
        if attached:
            found = Outcome(**cast(dict[str, Any], attached[-1]))
        append(self.path, replace(found, case=report.nodeid, seconds=round(report.duration, 2)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep what could not be imported."""
        if report.failed:
            self.absent[report.nodeid] = str(report.longrepr).splitlines()[-1]

    def pytest_testnodedown(self, node: object) -> None:
        """Take over the cases of all that were selected, whether they ran or not."""
        self.cases |= set(getattr(node, "workeroutput", {}).get("cases", ()))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Exit code 1 for a defect of replay's, and for nothing else."""
        session.exitstatus = int(any(row.outcome in BAD for row in self._rows()))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table."""
        rows = self._rows()
        terminalreporter.write_line(f"\n{len(rows)} of {len(self.cases)} cases\n{table(rows)}")
        for name, reason in self.absent.items():
            terminalreporter.write_line(f"not imported: {name}: {reason}")

    def _rows(self) -> list[Outcome]:
        return [row for row in read(self.path) if row.case in self.cases]
