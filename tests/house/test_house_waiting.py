"""Waiting in tests: an event that never comes is named, with what was printed."""

from __future__ import annotations

import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.helpers import waiting


def test_an_event_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LIMIT_S", 0.05)
    with pytest.raises(AssertionError, match=r"waited 0.05 s in vain for the tide\nstill low"):
        waiting.wait_for("the tide", lambda: False, lambda: "still low")
    waiting.wait_for("the tide", lambda: True)


def test_a_program_that_does_not_end_is_named_with_what_it_has_printed() -> None:
    program = "import time; print('half way', flush=True); time.sleep(1000)"
    with pytest.raises(AssertionError, match=r"in vain for the end of .*\nhalf way"):
        waiting.finished([sys.executable, "-c", program], limit=5.0)


def test_a_program_that_ends_leaves_its_output_and_its_exit_code() -> None:
    program = "import sys; print('a'); print('b', file=sys.stderr); sys.exit(3)"
    done = waiting.finished([sys.executable, "-c", program])
    assert (done.returncode, done.stdout, done.stderr) == (3, "a\n", "b\n")


def test_a_process_that_fails_ends_the_wait_for_all_of_them(tmp_path: Path) -> None:
    (tmp_path / "said1").write_text("the reason")
    context = get_context("fork")
    processes = {
        "rank 0": context.Process(target=sys.exit, args=(1,)),
        "rank 1": context.Process(target=time.sleep, args=(1000,)),
    }
    for process in processes.values():
        process.start()
    try:
        with pytest.raises(AssertionError, match=r"'rank 0': 1.*\nsaid1:\nthe reason"):
            waiting.ended_well(processes, tmp_path)
    finally:
        processes["rank 1"].kill()
        for process in processes.values():
            process.join()
