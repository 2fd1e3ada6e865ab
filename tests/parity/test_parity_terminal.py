"""The command in a terminal: Ctrl-C, progress, help and wrong words."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from tests.helpers.command import parity
from tests.helpers.waiting import output_of, wait_for
from tools.source import ROOT
from twinstep.parity.cli.command_line import SEQUENCES, known_laws, known_of_ours
from twinstep.parity.laws import LAWS
from twinstep.parity.operations.table import HOUSE
from twinstep.parity.records.ledger import Cell, Key, Status
from twinstep.parity.records.names import unknown
from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import kernels
from twinstep.parity.report import progress
from twinstep.parity.runner.calls.processes import descendants
from twinstep.parity.sequences.house_optimizers import register_our_optimizers
from twinstep.parity.sequences.judge import LAW
from twinstep.parity.sequences.registry import twins

Capture = pytest.CaptureFixture[str]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
COMMAND = (sys.executable, "-P", "-m", "twinstep.parity")
SLOW = """
import time
from twinstep.parity import register

@register("accumulate", name="slow", dtypes=("bf16", "fp16"))
def slow(accumulators, grads):
    try:
        time.sleep(0.03)
    except BaseException:
        pass
    for a, g in zip(accumulators, grads):
        a.add_(g.float())
"""
HELPS = (
    (),
    ("run",),
    ("check",),
    ("list",),
    ("doctor",),
    ("traffic",),
    ("ledger",),
    ("ledger", "diff"),
    ("ledger", "declare"),
    ("mutate",),
    ("compile",),
    ("replay-conformance",),
    ("peers",),
    ("scenario",),
    ("golden",),
)


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    """The command in a session of its own, as a terminal starts it."""
    return subprocess.Popen(
        [*COMMAND, *words],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def until_the_first_verdict(run: subprocess.Popen[str]) -> None:
    assert run.stderr is not None
    lines = []
    for line in run.stderr:
        if "first verdict" in line:
            return
        lines.append(line)
    raise AssertionError(f"the run ended before its first verdict: {''.join(lines)}")


def blocks_sigint(pid: int) -> bool:
    """True once the process that judges blocks SIGINT: a child of the one that was started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    if not children:
        return False
    status = Path(f"/proc/{children[0]}/status").read_text()
    blocked = re.search(r"^SigBlk:\s*(\w+)$", status, re.MULTILINE)
    return blocked is not None and bool(int(blocked[1], 16) >> (signal.SIGINT - 1) & 1)


def members(session: int) -> list[str]:
    """Processes of a session that are alive."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(stat.parent.name)
    return found


def interrupted(run: subprocess.Popen[str]) -> tuple[str, str]:
    """Output of a run after Ctrl-C, which every process of the terminal gets."""
    os.killpg(run.pid, signal.SIGINT)
    out, err = output_of(run)
    wait_for("the end of every process of the run", lambda: not members(run.pid))
    assert run.returncode == 130, err
    assert "Traceback" not in out + err
    return out, err


def test_ctrl_c_while_importing_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    run = started(tmp_path, "check", "slow.py")
    wait_for("the command to watch for SIGINT", lambda: blocks_sigint(run.pid))
    assert interrupted(run) == ("", "parity: interrupted\n")


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_while_judging_shows_what_is_on_record(jobs: str, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    run = started(tmp_path, "check", "slow.py", "--jobs", jobs)
    until_the_first_verdict(run)
    out, err = interrupted(run)
    assert re.search(r"^parity: interrupted: \d+ of 34 cells were judged$", err, re.MULTILINE)
    assert re.search(r"^slow +cpu ", out, re.MULTILINE)
    assert "34 cells declared" in out


def test_sigterm_takes_the_workers_along(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    run = started(tmp_path, "check", "slow.py", "--jobs", "2")
    until_the_first_verdict(run)
    # Torch is imported once: what serves the workers is no program of its own.
    programs = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(run.pid)]
    assert len(programs) >= 3
    assert not any(b"multiprocessing.forkserver" in program for program in programs)
    run.terminate()
    _, err = output_of(run)
    assert run.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in err
    wait_for("the end of every process of the run", lambda: not members(run.pid))


def test_sigterm_has_last_words_where_sigint_is_ignored_as_by_nohup(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run = started(tmp_path, "check", "slow.py", "--jobs", "1")
    finally:
        signal.signal(signal.SIGINT, ignored)
    until_the_first_verdict(run)
    run.terminate()
    _, err = output_of(run)
    assert run.returncode == 128 + signal.SIGTERM
    assert "parity: terminated" in err


def test_descendants_are_found_below_their_parents() -> None:
    with subprocess.Popen(["/bin/sh", "-c", "sleep 60 & sleep 60"]) as shell:
        wait_for("both children", lambda: len(descendants(shell.pid)) == 2)
        found = descendants(os.getpid())
        assert all(found.index(shell.pid) < found.index(pid) for pid in descendants(shell.pid))
        for pid in [*descendants(shell.pid), shell.pid]:
            os.kill(pid, signal.SIGKILL)


def test_a_terminal_of_80_columns_without_colours(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    terminal, end = pty.openpty()
    environment = {**ENVIRONMENT, "NO_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"}
    words = [*COMMAND, "check", "slow.py", "--quick", "--dtype", "bf16", "--law", "value"]
    run = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=end, stderr=end)
    os.close(end)
    shown = b""
    while True:
        try:
            shown += os.read(terminal, 65536)
        except OSError:  # the last process has closed it
            break
    os.close(terminal)
    assert run.wait() == 0
    text = shown.decode()
    assert not re.search(r"\x1b\[[\d;]*3\dm", text)
    assert "judging slow bf16: 0 of 1 cells" in text
    lines = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", text).replace("\r", "\n").split("\n")
    assert max(map(len, lines)) <= 80
    last = [line for line in lines if line.strip()][-1]
    assert re.fullmatch(r"all laws kept in 1 cell in [\d.]+ s", last)


def test_json_on_standard_output_leaves_the_rest_to_standard_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("slow.py").write_text(SLOW)
    words = ("check", "slow.py", "--quick", "--dtype", "bf16", "--law", "repeat")
    assert parity(*words, "-v", "--json", "-") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["counts"]["passed"] == 1
    assert "slow (accumulate, cpu)" in captured.err
    assert re.search(r"^all laws kept in 1 cell in [\d.]+ s$", captured.err, re.MULTILINE)


WRONG = (
    (("run", "--engine", "bogus"), "should be among cpu, cuda, interpret, replay"),
    (("run", "--dtype", "fp17"), "did you mean fp16?"),
    (("run", "--kernel", "adamw"), "did you mean cpu.adamw_step?"),
    (("run", "--op", "adamw"), "did you mean adamw_step?"),
    (("run", "--law", "valu"), "did you mean value?"),
    (("run", "--nonsense"), "--nonsense"),
    (("run", "--json", "a", "--junitxml", "a"), "both write a"),
    (("check",), "FILE"),
    (("check", "nowhere.py"), "nowhere.py does not exist"),
    (("check", "folder.py"), "folder.py is a folder"),
    (("check", "binary.py"), "binary.py is a binary file"),
    (("check", "latin.py"), "latin.py is not UTF-8 text"),
    (("check", "empty.py"), "empty.py is empty"),
    (("check", "text.txt"), "its name should end with .py"),
    (("check", "wrong.py"), "has a syntax error: invalid syntax [wrong.py:1]"),
    (("check", "right.py", "--law", "gravity"), '--law "gravity" is unknown'),
    (("check", "right.py", "--json", "empty.py/x"), "--json empty.py/x cannot be written"),
    (("check", "right.py", "--junitxml", "folder.py"), "--junitxml folder.py cannot be written"),
    (("traffic", "--op", "adamw"), "did you mean adamw_step?"),
)
EACH = """
import contextlib, io, json, sys
from twinstep.parity.__main__ import main
for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        try:
            main(words)
        except SystemExit as end:
            print(json.dumps([end.code, said.getvalue(), "torch" in sys.modules]))
"""


def test_wrong_words_are_found_without_torch_and_before_the_run(tmp_path: Path) -> None:
    for name, data in {
        "binary.py": b"\x89PNG\0",
        "latin.py": b'x = "\xe9"\n',
        "empty.py": b"\n",
        "text.txt": b"x = 1\n",
        "wrong.py": b"def x(:\n",
        "right.py": b"x = 1\n",
    }.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "folder.py").mkdir()
    words = json.dumps([words for words, _ in WRONG])
    done = subprocess.run(
        [sys.executable, "-P", "-c", EACH, words],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(WRONG)
    for (_, says), (code, said, torch) in zip(WRONG, found, strict=True):
        assert code == 2, said
        assert says in said
        assert said.startswith("parity: ")
        assert said.count("\n") == 1
        assert not torch, said
    assert not (tmp_path / "a").exists()


def test_names_known_without_torch_are_those_of_the_registries() -> None:
    register_house()
    register_our_optimizers()
    operations, ours, dtypes = known_of_ours()
    folders = ("triton.", "fast.", "cuda.", "cpu.", "native.")
    known = [kernel for kernel in kernels() if kernel.name.startswith(folders)]
    assert ours == {each.name for each in known} | {twin.name for twin in twins()}
    assert operations == {op.name for op in HOUSE} | {twin.reference.__name__ for twin in twins()}
    assert dtypes == {dtype for op in HOUSE for dtype in op.combinations}
    assert set(LAWS) | {LAW} <= known_laws()
    assert SEQUENCES == LAW


def test_the_nearest_name_is_suggested() -> None:
    assert str(unknown("--dtype", "fp17", ["fp16", "bf16"])).endswith("; did you mean fp16?")
    assert str(unknown("--dtype", "xyz", ["fp16", "bf16"])).endswith("among bf16, fp16")
    many = [f"kernel{n}" for n in range(50)]
    assert "among" not in str(unknown("--kernel", "x", many, "parity list"))


@pytest.mark.parametrize("words", HELPS, ids=" ".join)
def test_help_fits_80_columns_and_no_sentence_is_cut(
    words: tuple[str, ...], capsys: Capture
) -> None:
    assert parity(*words, "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines[1:] if "..." in line or "…" in line]
    if words in ((), ("run",), ("check",)):
        assert {"0", "1", "2", "3", "4", "130"} <= {
            line.split()[0] for line in lines if line.split()
        }


def test_version_is_that_of_the_project(capsys: Capture) -> None:
    assert parity("--version") == 0
    assert re.match(r"parity \d+\.\d+\.\d+ \(torch \d", capsys.readouterr().out)


def test_elsewhere_than_on_a_terminal_the_line_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST", 0.02)
    monkeypatch.setattr(progress, "EVERY", 0.02)
    shown = io.StringIO()
    with progress.Progress() as line:
        line.screen = Console(file=shown, width=80)
        line.phase("loading x.py")
        wait_for("a second line", lambda: shown.getvalue().count("loading x.py\n") >= 2)
        line.follow(lambda: "2 of 3")
        wait_for("the count", lambda: shown.getvalue().endswith("2 of 3\n"))
    before = shown.getvalue()
    time.sleep(0.1)
    assert shown.getvalue() == before


def judged(law: str, operation: str, seconds: float) -> Cell:
    key = Key(operation=operation, kernel="k", dtype="fp16", law=law, engine="cpu")
    return Cell(key=key, status=Status.PASSED, calls=1, seconds=seconds)


def test_the_time_left_is_learnt_from_laws_weights_and_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    weights = {"small": 1, "large": 3, "first": 1}
    cells = [judged(law, op, 0.0) for law in ("value", "repeat") for op in ("small", "large")]
    first = judged("value", "first", 0.0)
    expected = [
        SimpleNamespace(key=cell.key, work=weights[cell.key.operation]) for cell in (first, *cells)
    ]
    count = progress.JudgedCells(expected)  # type: ignore[arg-type]
    count.add(first)
    assert count.text().endswith("1 of 5 cells, 0 s so far")
    # Two processes: ten seconds of work in five.
    now[0] += 5.0
    count.add(judged("value", "small", 2.0))
    count.add(judged("repeat", "small", 8.0))
    assert count.left() == pytest.approx((2.0 * 3 + 8.0 * 3) / 2)
    assert count.text().endswith("3 of 5 cells, about 15 s left")


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "5 s"), (43, "45 s"), (61, "1 min"), (340, "6 min")]
)
def test_an_estimate_is_as_coarse_as_it_is_sure(seconds: float, words: str) -> None:
    assert progress.duration(seconds) == words
