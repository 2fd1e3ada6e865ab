"""Hostile and broken kernels: each is one true sentence, none ends the judge or hides another."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import signal
import time
from multiprocessing.util import _finalizer_registry  # type: ignore[attr-defined]
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.helpers.waiting import wait_for
from twinstep.parity.cli.judge_command import printed
from twinstep.parity.laws.plan import Values
from twinstep.parity.records.errors import KernelTimeout, UsageError
from twinstep.parity.records.ledger import Cell, Ledger, Status
from twinstep.parity.registry.selection import Selection
from twinstep.parity.report.table import print_table
from twinstep.parity.runner.calls import invoke, limits
from twinstep.parity.runner.calls.process_state import ProcessState, child_processes, turned
from twinstep.parity.runner.calls.processes import descendants
from twinstep.parity.runner.calls.subject import Subject
from twinstep.parity.runner.recipes import Effort
from twinstep.parity.runner.session import Session
from twinstep.parity.runner.shared import Shared, sharing
from twinstep.parity.runner.source import Source

HEAD = """
import ctypes, os, random, subprocess, sys, threading, time, warnings
import numpy, torch
from twinstep.parity import register

KEPT = []

def right(accumulators, grads):
    for a, g in zip(accumulators, grads):
        a.add_(g.float())

def kernel(function):
    return register("accumulate", name=function.__name__, dtypes=("bf16",))(function)
"""
# Name: body, and what the verdict has to say.
FATAL = {
    "exits": ("sys.exit(0)", "ends its process: SystemExit(0)"),
    "exits_at_once": ("os._exit(0)", "ends its process with exit code 0"),
    "aborts": ("os.abort()", "crashes its process with SIGABRT"),
    "crashes": ("ctypes.string_at(0)", "crashes its process with SIGSEGV"),
    "loops": ("while True: pass", "hangs: no return after 1 s of work"),
    "swallows": (
        """while True:
        try:
            while True: pass
        except BaseException: pass""",
        "hangs: no return after",
    ),
    "waits": ("time.sleep(1000)", "hangs: no return after 2 s of waiting"),
    "prints": ("while True: print('x' * 100_000)", "prints without end"),
    "forks": ("while True: os.fork()", "starts processes without end"),
}
RAISES = {
    "recurses": ("recurses(accumulators, grads)", "raises RecursionError"),
    "interrupts": ("raise KeyboardInterrupt", "raises KeyboardInterrupt"),
}
# Seconds that only processes of this test run sleep.
ASLEEP = 100_000 + os.getpid()
LEAVES = {
    "torch_rng": ("torch.rand(1)", "changes torch's random numbers"),
    # Not in the six calls of the law itself, but in the first one of all.
    "once": (
        "if not hasattr(once, 'done'): once.done = random.random()",
        "changes Python's random numbers",
    ),
    "numpy_rng": ("numpy.random.rand()", "changes NumPy's random numbers"),
    "python_rng": ("random.random()", "changes Python's random numbers"),
    "dtype": ("torch.set_default_dtype(torch.float64)", "changes the default dtype"),
    "grad": ("torch.set_grad_enabled(False)", "changes whether gradients are recorded"),
    "deterministic": ("torch.use_deterministic_algorithms(True)", "changes deterministic"),
    "tf32": ("torch.set_float32_matmul_precision('high')", "changes the precision of float32"),
    "threads": ("torch.set_num_threads(2)", "changes the number of torch's threads"),
    "subnormals": ("torch.set_flush_denormal(True)", "changes subnormal numbers"),
    "filters": ("warnings.simplefilter('ignore')", "changes the warning filters"),
    # A module that is imported may bring filters, but none for all warnings.
    "filters_and_imports": (
        "sys.modules[f'new{len(sys.modules)}'] = sys; warnings.simplefilter('ignore')",
        "changes the warning filters",
    ),
    "backends": ("torch.backends.cudnn.benchmark = True", "changes switches of torch's backends"),
    "environment": ("os.environ['A_NAME'] = 'x'", "changes the environment"),
    "reverses": ("grads.reverse()", "changes the caller's list grads"),
    "requires": ("accumulators[0].requires_grad_()", "requires_grad of a tensor of accumulators"),
    "keeps": ("KEPT.extend(g.clone() for g in grads)", "tensors more behind with every call"),
    "thread": (
        "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
        "1 threads more behind with every call",
    ),
    "process": (
        f"subprocess.Popen(['sleep', '{ASLEEP}'])",
        "1 processes more behind with every call",
    ),
    "patches": (
        "import twinstep.parity.laws.plan as p; p.Values.violation = lambda self, o: None",
        "replaces twinstep.parity.laws.plan.Values.violation",
    ),
}
# What depends on switches that nobody turns around a step: a note, and no failure.
NOTED = {
    "refuses_autocast": (
        "if torch.is_autocast_enabled('cpu'): raise ValueError('not in autocast')",
        "raises ValueError: not in autocast",
    ),
    "default_dtype": (
        "third = float(torch.tensor(1 / 3)); [a.add_(third).sub_(0.3333333432674408)"
        " for a in accumulators if third != 0.3333333432674408]",
        "accumulators depends on the default dtype, autocast or another switch",
    ),
}
UNABLE = {
    "gpu": ("torch.cuda.current_stream()", "asks for a GPU, and there is none here"),
    "module": ("import nothing_of_that_name", "needs the module nothing_of_that_name"),
    "memory": ("torch.empty(1 << 60)", "needs more memory than there is"),
    "unwritable": ("open('/proc/version/x', 'w')", "cannot write /proc/version/x"),
}
LAWS = ("value", "process_state")


def _body(name: str, body: str, then: str) -> str:
    return f"@kernel\ndef {name}(accumulators, grads):\n{then}    {body}\n\n"


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ledger, Path]:
    file = tmp_path_factory.mktemp("hostile") / "kernels.py"
    ends = {**FATAL, **RAISES, **UNABLE}
    bodies = [_body(name, body, "") for name, (body, _) in ends.items()]
    first = "    right(accumulators, grads)\n"
    bodies += [_body(name, body, first) for name, (body, _) in (LEAVES | NOTED).items()]
    bodies.append(_body("honest", "right(accumulators, grads)", ""))
    file.write_text(HEAD + "\n".join(bodies))
    opened = Source(file=str(file)).open()
    effort = Effort(examples=2, repros=None, call_seconds=1.0, shrink_seconds=0.5)
    selection = Selection(laws=LAWS, dtypes=("bf16",))
    assert opened.subject is not None
    session = Session(selection=selection, effort=effort, subject=opened.subject)
    with sharing(Shared()):
        ledger = session.run(opened.kernels)
    opened.subject.close()
    return ledger, file


def _cells(ledger: Ledger, name: str) -> dict[str, Cell]:
    return {key.law: cell for key, cell in ledger.cells.items() if key.kernel == name}


@pytest.mark.parametrize("name", FATAL)
def test_an_end_of_the_process_is_a_named_failure_found_once(
    judged: tuple[Ledger, Path], name: str
) -> None:
    cells = _cells(judged[0], name)
    assert cells["value"].status is Status.FAILED
    assert f"breaks `value`: the kernel {FATAL[name][1]}" in cells["value"].failure
    assert cells["process_state"].status is Status.CANNOT_JUDGE
    assert cells["process_state"].reason.startswith("not called again after `value`")


@pytest.mark.parametrize("name", ["crashes", "loops", "swallows", "waits"])
def test_a_crash_and_a_hang_name_the_line_of_the_users_file(
    judged: tuple[Ledger, Path], name: str
) -> None:
    ledger, file = judged
    lines = file.read_text().splitlines()
    first = next(at for at, row in enumerate(lines) if row.startswith(f"def {name}("))
    place = _cells(ledger, name)["value"].failure.splitlines()[0].rpartition("[")[2].rstrip("]")
    path, line = place.rsplit(":", 1)
    assert path == str(file)
    assert first + 1 < int(line) <= first + 6


@pytest.mark.parametrize("name", RAISES)
def test_what_a_kernel_raises_is_its_failure(judged: tuple[Ledger, Path], name: str) -> None:
    assert f"the kernel {RAISES[name][1]}" in _cells(judged[0], name)["value"].failure


@pytest.mark.parametrize("name", LEAVES)
def test_what_a_kernel_leaves_behind_is_a_finding_of_its_own_law(
    judged: tuple[Ledger, Path], name: str
) -> None:
    cells = _cells(judged[0], name)
    assert cells["value"].status is Status.PASSED
    assert LEAVES[name][1] in cells["process_state"].failure


@pytest.mark.parametrize("name", NOTED)
def test_what_depends_on_switches_is_a_note_and_no_failure(
    judged: tuple[Ledger, Path], name: str
) -> None:
    cell = _cells(judged[0], name)["process_state"]
    assert cell.status is Status.PASSED, cell.failure
    assert NOTED[name][1] in cell.note
    assert cell.record()["note"] == cell.note
    screen = Console(width=1000, file=io.StringIO())
    print_table(screen, Ledger(declared=(cell.key,), cells={cell.key: cell}))
    assert isinstance(screen.file, io.StringIO)
    assert f"note  {name}: {cell.note} (process_state: no failure)" in screen.file.getvalue()


@pytest.mark.parametrize("name", UNABLE)
def test_what_cannot_be_run_here_is_no_broken_law(judged: tuple[Ledger, Path], name: str) -> None:
    cells = _cells(judged[0], name)
    assert {cell.status for cell in cells.values()} == {Status.CANNOT_JUDGE}
    assert UNABLE[name][1] in cells["value"].reason
    assert str(judged[1]) in cells["value"].reason


def test_the_kernel_after_all_of_them_passes_and_nothing_is_left_running(
    judged: tuple[Ledger, Path],
) -> None:
    ledger, _ = judged
    assert {cell.status for cell in _cells(ledger, "honest").values()} == {Status.PASSED}
    assert Values.violation.__name__ == "violation"
    assert ledger.missing() == []
    assert ledger.exit_code() == 1
    wait_for("the end of the programs that kernels have started", lambda: not _sleeping())


def test_memory_without_end_is_named_and_what_is_printed_is_shown_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MEMORY_SHARE", 0.05)
    file = tmp_path / "kernels.py"
    talks = _body("talks", "print('a word'); right(accumulators, grads)", "")
    body = "while True: KEPT.append(torch.ones(1 << 24))"
    file.write_text(HEAD + _body("hoards", body, "") + talks)
    opened = Source(file=str(file)).open()
    assert opened.subject is not None
    effort = Effort(examples=2, repros=None, call_seconds=20.0)
    selection = Selection(laws=("value", "repeat"), dtypes=("bf16",))
    session = Session(selection=selection, effort=effort, subject=opened.subject)
    ledger = session.run(opened.kernels)
    opened.subject.close()
    assert "the kernel takes " in _cells(ledger, "hoards")["value"].failure
    assert "GiB of memory" in _cells(ledger, "hoards")["value"].failure
    shown = printed(ledger)
    assert list(shown) == ["talks"]
    assert re.fullmatch(r"a word  \(\d+ times\)", shown["talks"])


def test_a_compiled_kernel_stays_compiled_whatever_shapes_it_meets(tmp_path: Path) -> None:
    file = tmp_path / "kernels.py"
    body = """
def total(a, g):
    return a + g.float() if torch.compiler.is_compiling() else a + 1.0

one_each = torch.compile(total, dynamic=False, backend="eager")
for_all = torch.compile(total, dynamic=True, backend="eager")
"""
    calls = "for a, g in zip(accumulators, grads): a.copy_({}(a, g))"
    names = ("one_each", "for_all")
    kernels = [_body(f"kernel_{name}", calls.format(name), "") for name in names]
    file.write_text("\n".join([HEAD + body, *kernels]))
    opened = Source(file=str(file)).open()
    assert opened.subject is not None
    selection = Selection(laws=("value", "process_state"), dtypes=("bf16",))
    effort = Effort(examples=4, repros=None)
    ledger = Session(selection=selection, effort=effort, subject=opened.subject).run(opened.kernels)
    opened.subject.close()
    for name in names:
        cells = _cells(ledger, f"kernel_{name}")
        assert {cell.status for cell in cells.values()} == {Status.PASSED}, name


def test_who_waits_for_the_reader_of_the_output_does_not_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(invoke, "STDOUT", writer)
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(1 << 16))
    with invoke.time_limit(0.05):
        time.sleep(0.3)
    os.read(reader, 1 << 16)
    with pytest.raises(KernelTimeout, match="of waiting"), invoke.time_limit(0.05):
        time.sleep(0.3)
    os.close(reader)
    os.close(writer)


def test_the_limit_of_a_call_leaves_that_of_its_caller_running() -> None:
    signal.setitimer(signal.ITIMER_REAL, 100.0)
    try:
        with invoke.time_limit(5.0):
            pass
        assert 90.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 100.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_a_closed_process_is_never_killed_again() -> None:
    """Its number may be another's by then."""
    before, subject = _at_our_end(), Subject()
    subject.load()
    (at,) = _at_our_end() - before
    subject.close()
    assert at not in _at_our_end()


def _at_our_end() -> set[object]:
    return {key for key, one in _finalizer_registry.items() if "kill_session" in repr(one)}


def test_a_process_that_ends_while_processes_are_counted_ends_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A path below it may end in ESRCH for a moment, which `Path.glob` does not take for absent."""

    def gone(path: Path, **_: object) -> None:
        raise ProcessLookupError(path)

    monkeypatch.setattr(Path, "stat", gone)
    assert os.getpid() in descendants(os.getppid())


def test_a_thread_that_ends_while_processes_are_counted_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "listdir", lambda _: [str(os.getpid()), "0"])
    assert isinstance(child_processes(), list)


def _sleeping() -> list[int]:
    found = []
    for number in descendants(1):
        words = Path(f"/proc/{number}/cmdline")
        if words.exists() and words.read_bytes() == f"sleep\0{ASLEEP}\0".encode():
            found.append(number)
    return found


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("os._exit(0)", "cannot be imported: it ends its process with exit code 0"),
        ("sys.exit(3)", "cannot be imported: SystemExit: 3"),
        ("ctypes.string_at(0)", "cannot be imported: it crashes its process with SIGSEGV"),
        ("torch.add = None", "replaces torch.add when it is imported"),
    ],
)
def test_a_file_that_does_not_survive_its_import_is_refused(
    tmp_path: Path, body: str, says: str
) -> None:
    file = tmp_path / "kernels.py"
    file.write_text(HEAD + "kernel(right)\n" + body + "\n")
    with pytest.raises(UsageError, match=says):
        Source(file=str(file)).open()


def test_switches_are_turned_and_put_back() -> None:
    before = ProcessState()
    with turned(torch.float16):
        assert not gc.isenabled()
        assert not torch.is_grad_enabled()
        assert torch.get_default_dtype() == torch.float16
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16
    assert list(before.changes()) == []


UNSCALE = """
import torch
from twinstep.parity import register

@register("unscale", name="mine", arithmetic="exact", dtypes=("bf16",), engines=("cpu",))
def mine(grads, *, inv_scale, found_inf):
    for g in grads:
        if not bool(torch.isfinite(g).all()):
            found_inf.fill_(1.0)
        g.copy_(g.float() * inv_scale)
"""


def test_gradients_that_a_kernel_writes_are_found_where_they_lie(tmp_path: Path) -> None:
    """`repeat` lets gradients of one size exchange their places, in the kernel's process too."""
    file = tmp_path / "mine.py"
    file.write_text(UNSCALE)
    opened = Source(file=str(file)).open()
    assert opened.subject is not None
    effort = Effort(repros=None)
    selection = Selection(laws=("repeat",))
    ledger = Session(selection=selection, effort=effort, subject=opened.subject).run(opened.kernels)
    opened.subject.close()
    assert len(ledger.with_status(Status.PASSED)) == 1, str(ledger.with_status(Status.FAILED))
