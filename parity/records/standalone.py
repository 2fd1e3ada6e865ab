"""Stand-alone repro files: folder and names, the command that runs one, and a run of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = "parity_repros"
# Exit codes of the process in which a subject runs: one that exits by itself uses others.
KEPT, BROKEN, CANNOT_LOAD = 10, 11, 14
GUARD = f"""LIMIT = 120
KEPT, BROKEN, CANNOT_LOAD = {KEPT}, {BROKEN}, {CANNOT_LOAD}
if __name__ == "__main__" and len(sys.argv) == 1:
    code = None
    try:
        code = subprocess.run([sys.executable, __file__, "here"], timeout=LIMIT).returncode
    except subprocess.TimeoutExpired:
        print(f"it hangs: no return after {{LIMIT}} s")
    if code is not None and code not in (KEPT, BROKEN, CANNOT_LOAD):
        print("it ends its process:", f"exit code {{code}}" if code >= 0 else f"signal {{-code}}")
    sys.exit({{KEPT: 0, CANNOT_LOAD: 4}}.get(code, 1))
"""
# What file systems or shells may take amiss in a name.
UNSAFE = re.compile(r"[^\w.-]+")
COUNTED = re.compile(r"broken in (\d+) of (\d+) runs")
HANGS = 10.0


def repro_path(folder: str, *names: str) -> Path:
    """Path of the file of that name; the folder is made, and ignored by git if it is the usual."""
    home = Path(folder)
    home.mkdir(parents=True, exist_ok=True)
    if home.name == FOLDER:
        (home / ".gitignore").write_text("*\n")
    return home / f"repro_{UNSAFE.sub('-', '_'.join(names))}.py"


def command_for(path: str) -> str:
    """The command that runs a file with this interpreter; paths below the folder are relative."""
    return f"{_near(sys.executable)} {_near(path)}"


def _near(path: str) -> str:
    absolute = os.path.abspath(path)
    inside = Path(absolute).is_relative_to(Path.cwd())
    return os.path.relpath(absolute) if inside else absolute


@dataclass(frozen=True)
class Run:
    """End of a run of a repro file.

    Attributes:
        broken: how often the law was broken.
        runs: how often it was judged; 0 if the run did not come to its end.
        refused: why the subject cannot be loaded; empty if it can.
    """

    broken: int = 0
    runs: int = 0
    refused: str = ""


Execute = Callable[[Sequence[str], float], "subprocess.CompletedProcess[str]"]


def fresh(words: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a Python file as a user does."""
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)


def run_file(
    path: str, seconds: float, count: int = 0, hangs: bool = False, execute: Execute = fresh
) -> Run:
    """Run a file in a child process.

    Args:
        path: of the file.
        seconds: the child is stopped after so long.
        count: how often the law is judged in that process; 0 for the file's own number.
        hangs: whether the judge has seen the subject hang, so that a late end is a failure.
        execute: runs it.
    """
    if seconds <= 0:
        return Run()
    words = [path, "here", *([str(count)] if count else [])]
    limit = min(seconds, HANGS) if hangs else seconds
    try:
        done = execute(words, limit)
    except subprocess.TimeoutExpired:
        return Run(1, 1) if hangs else Run()
    if done.returncode == CANNOT_LOAD:
        return Run(refused=(done.stdout.splitlines() or ["it cannot be loaded"])[-1])
    counted = COUNTED.search(done.stdout)
    if counted:
        return Run(int(counted[1]), int(counted[2]))
    # A subject may end its process; a file that is itself wrong breaks no law.
    wrong = done.returncode == 1 and "Traceback" in done.stderr
    return Run(int(done.returncode != KEPT and not wrong), 1)
