"""A process that runs cases: on replay, in a sampled order, each with a limit.

Every function gives its first cases before any gives its next; which come first is decided by a
hash of their names.
"""

from __future__ import annotations

import signal
import zlib
from collections import defaultdict
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import asdict
from time import monotonic

import pytest
import torch

from tools.foreign.device import cuda_on_replay
from tools.foreign.outcomes import Outcome, read
from tools.foreign.reasons import TooSlow, of_error

FIRST = 3
"""Cases of every function that come before all others."""


class Worker:
    """Hooks of the process; the device is there while modules of tests are imported."""

    def __init__(self) -> None:
        self.started = monotonic()
        self.running = ExitStack()
        self.running.enter_context(cuda_on_replay())
        # This imports much, which the limit of a case must not cut off half-way.
        torch.testing.assert_close(torch.ones(1), torch.ones(1))

    def pytest_unconfigure(self) -> None:
        """Give the device back."""
        self.running.close()

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out what was run before, and order the rest by sample."""
        # Every worker must select the same cases, also one that starts anew after a crash: by then
        # the file has more lines.
        known = read(config.getoption("--outcomes"))[: config.getoption("--known")]
        done = {row.case for row in known}
        ranks: dict[str, int] = defaultdict(int)
        order: list[tuple[int, pytest.Item]] = []
        for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode())):
            function = item.nodeid.partition("[")[0]
            ranks[function] = min(ranks[function] + 1, FIRST + 1)
            order.append((ranks[function], item))
        config.workeroutput["cases"] = [item.nodeid for item in items]  # type: ignore[attr-defined]
        order.sort(key=lambda row: row[0])
        items[:] = [item for _, item in order if item.nodeid not in done]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Start no case once the time for all is over."""
        return True if monotonic() - self.started > item.config.getoption("--seconds") else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """End a case at its limit."""

        def stop(*_: object) -> None:
            raise TooSlow

        previous = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, item.config.getoption("--limit"))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the outcome to the report, which travels to the process that collects them."""
        report = yield
        if report.when == "call" or not report.passed:
            error = call.excinfo.value if call.excinfo else None
            found = of_error(error) if error else Outcome("passed")
            if report.skipped:
                found = Outcome("skipped", str(error).splitlines()[0])
            report.user_properties.append(("outcome", asdict(found)))
        return report
