"""Make `.venv` ready: pinned versions where a package registry answers, installed ones elsewhere.

Two outcomes, told apart by the stamp `.venv/twinstep.json`:

- pinned: an ordinary virtual environment, filled by one `pip install` under constraints.txt.
- installed: `.venv/bin/python` is a two-line script that starts an interpreter which already has
  torch and triton. Nothing is downloaded. (A virtual environment with system site-packages would
  not do: one made from another virtual environment sees the system's packages, not its parent's.)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "twinstep.json"
CONSTRAINTS = ROOT / "constraints.txt"
# What decides the outcome: when one of these changes, set-up runs again.
RECIPE = (CONSTRAINTS, ROOT / "pyproject.toml", Path(__file__).resolve())
HERE = f"Python {sys.version_info[0]}.{sys.version_info[1]} at {sys.executable}"
# The smallest pinned package: fetching it tells whether a registry answers.
PROBE = "iniconfig"
IMPORTS = "import hypothesis, numpy, pytest, rich, torch, triton, triton.compiler, typer"
BORROWED = "#!/bin/sh\n# Written by set-up: uses an interpreter that has everything already.\n"
OPTIONAL = {
    "pytest": "make test",
    "matplotlib": "pictures of scenarios",
    "cuda-bindings": "kernels in CUDA C++",
    "bitwuzla": "proofs where formulas differ",
    "pytest-xdist": "parallel tests",
    "pytest-benchmark": "make bench",
    "ruff": "make check",
    "mypy": "make check",
    "import-linter": "make check",
    "pre-commit": "the commit hooks",
}
DEPENDENCIES: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "dependencies"
]
REMEDY = (
    "connect to a package registry, or name a Python 3.11 or newer that has "
    + ", ".join(re.split("[<>=; ]", line)[0] for line in DEPENDENCIES)
    + " with `make PYTHON=/path/to/python3`."
)


class Refusal(Exception):
    """Set-up cannot go on. The message is one sentence that ends in what to do."""


class Progress:
    """One line on standard output: redrawn on a terminal, printed every ten seconds elsewhere."""

    def __init__(self) -> None:
        self.moving = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self.printed = float("-inf")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.clear()
        print(f"set-up: {text}", flush=True)
        self.printed = time.monotonic()

    def show(self, text: str) -> None:
        """Show what is going on now."""
        if self.moving:
            print(f"\r\x1b[Kset-up: {text}", end="", flush=True)
        elif time.monotonic() - self.printed >= 10:
            self.say(text)

    def clear(self) -> None:
        """Wipe what is shown."""
        if self.moving:
            print("\r\x1b[K", end="", flush=True)


progress = Progress()


def main() -> int:
    """Set up; 0 when `.venv` is ready, 2 or 130 and one sentence on standard error if it is not."""
    parser = argparse.ArgumentParser(description="Make .venv ready.")
    parser.add_argument("--choice", choices=("auto", "pinned", "installed"), default="auto")
    parser.add_argument("--need", nargs="*", default=[], choices=sorted(OPTIONAL))
    parser.add_argument("--insist", action="store_true", help="under no other interpreter")
    options = parser.parse_args()
    if Path(sys.prefix).resolve() == VENV.resolve():  # somebody activated it
        base = str(getattr(sys, "_base_executable", sys.executable))
        os.execv(base, [base, *sys.argv])
    try:
        stamp = stamped()
        if not holds(stamp, options.choice, options.insist):
            stamp = set_up(options.choice, stamp)
        if missing := [name for name in options.need if name in stamp["absent"].split()]:
            raise Refusal(
                f"{', '.join(missing)} not installed under {stamp['python']}: install it there, or "
                "connect to a package registry and run `make setup SETUP=pinned`."
            )
    except Refusal as refusal:
        progress.clear()
        print(refusal, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        progress.clear()
        print("set-up: interrupted; the next command begins it anew", file=sys.stderr)
        return 130
    return 0


def stamped() -> dict[str, str]:
    """Stamp of the last finished set-up, outdated or not; empty if there is none."""
    try:
        return dict(json.loads(STAMP.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def recipe() -> str:
    """Digest of the files that decide what set-up does."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in RECIPE)).hexdigest()


def holds(stamp: dict[str, str], choice: str, insist: bool) -> bool:
    """True if the last set-up is still the one that is asked for."""
    return (
        stamp.get("recipe") == recipe()
        and choice in ("auto", stamp["mode"])
        and not (insist and stamp["python"] != sys.executable)
        and os.access(PYTHON, os.X_OK)
    )


def set_up(choice: str, last: dict[str, str]) -> dict[str, str]:
    """Bring `.venv` into its state, say so, and return the new stamp.

    Raises:
        Refusal: nothing on this machine can run the project.
    """
    started = time.monotonic()
    require_compiler()
    progress.say("making .venv ready, which is done once and takes a minute or two")
    reason = why_installed(choice, last)
    absent = [name for name in OPTIONAL if reason and not found(name)]
    if reason:
        borrow()
        versions = f"torch {found('torch')}, triton {found('triton')}"
        progress.say(f"using {sys.executable} unchanged, {versions} ({reason})")
    else:
        seconds = time.monotonic() - started
        progress.say(f".venv with the versions of constraints.txt ({seconds:.0f} s)")
    if absent:
        left_out = ", ".join(f"{name} ({OPTIONAL[name]})" for name in absent)
        progress.say(f"left out, not installed here: {left_out}")
    stamp = {
        "recipe": recipe(),
        "mode": "installed" if reason else "pinned",
        "python": sys.executable,
        "absent": " ".join(absent),
    }
    STAMP.write_text(json.dumps(stamp, indent=1) + "\n")
    return stamp


def why_installed(choice: str, last: dict[str, str]) -> str:
    """Install the pinned versions; return "" or why the installed ones must do.

    Raises:
        Refusal: they will not do either.
    """
    lacking = unsuitable()
    if choice == "installed":
        if lacking:
            raise Refusal(f"{HERE} cannot be used unchanged ({lacking}): {REMEDY}")
        return "as asked"
    may_borrow = choice == "auto" and not lacking
    if may_borrow and not registry_answers():
        return "pip reaches no package registry"
    problem = make_venv(last) or install()
    if problem and not may_borrow:
        other = f", and {HERE} has {lacking}" if lacking else ""
        raise Refusal(f"{problem}{other}: {REMEDY}")
    return problem


def require_compiler() -> None:
    """Refuse where kernels will be launched on a GPU and Triton cannot build its launcher."""
    if not (Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi")):
        return
    if not (os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc")):
        raise Refusal(
            "this machine has a GPU and no C compiler, which Triton needs to launch kernels: "
            "install gcc or clang, or name one with CC=/path/to/cc."
        )
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise Refusal(
            f"this machine has a GPU and {HERE} lacks Python.h, which Triton needs to launch "
            "kernels: install its headers (Debian: apt install python3-dev)."
        )


def found(name: str) -> str:
    """Version of a package under this interpreter, found without importing it; "" if missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def unsuitable() -> str:
    """Required packages that are missing, too old or too new here, in words; "" if all are fine."""
    problems = []
    for line in DEPENDENCIES:
        name = re.split("[<>=; ]", line)[0]
        here = found(name)
        problems += [f"no {name}"] * (not here)
        for sign, bound in re.findall(r"(>=|<)([\d.]+)", line) if here else ():
            older = release(here) < release(bound)
            if sign == ">=" and older:
                problems.append(f"{name} {here} is older than {bound}")
            elif sign == "<" and not older:
                problems.append(f"{name} {here} is untested, needs < {bound}")
    return ", ".join(problems)


def release(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: "2.11.0+cu130" → (2, 11, 0)."""
    leading = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, leading[0].split("."))) if leading else ()


def registry_answers() -> bool:
    """True if pip, as this machine configures it, can fetch one small pinned package."""
    progress.show("asking the package registry, for 20 s at most")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            folder,
        ]
        command += ["--timeout", "5", "--retries", "0", "--constraint", str(CONSTRAINTS), PROBE]
        return run(command, 20)[0] == 0


def make_venv(last: dict[str, str]) -> str:
    """Create the virtual environment, or mend it; return "" or what is wrong."""
    if find_spec("venv") is None or find_spec("ensurepip") is None:
        return f"{HERE} has no complete venv module (Debian: apt install python3-venv)"
    progress.show("making an empty .venv")
    # A working venv that somebody else made is filled; a broken one or our own script makes way.
    question = "import sys; sys.exit(sys.prefix != sys.argv[1])"
    broken = os.path.lexists(PYTHON) and run([str(PYTHON), "-c", question, str(VENV)])[0] != 0
    clear = broken or last.get("python", sys.executable) != sys.executable
    command = [sys.executable, "-m", "venv", *(["--clear"] if clear else []), str(VENV)]
    status, output = run(command)
    return f"{' '.join(command)} failed: {last_line(output)}" if status else ""


def install() -> str:
    """One `pip install` of everything, pinned; return "" or pip's own last word."""
    command = [str(PYTHON), "-m", "pip", "install", "--progress-bar=off", "--retries", "2"]
    command += ["--no-compile", "--constraint", str(CONSTRAINTS)]
    command += ["--editable", f"{ROOT}[dev,cuda,prove]"]
    there = len(installed())
    status, output = run(command, told=lambda text: progress.show(stage(text, there)))
    if status == 0:
        progress.show("compiling what will be imported")
        # Byte-compile what will be imported, not all of torch: a third of the time. -E, because
        # PYTHONDONTWRITEBYTECODE would have every process compile torch anew.
        status, output = run([str(PYTHON), "-E", "-c", IMPORTS])
    (VENV / "setup.log").write_text(output)
    return f"pip could not install the pinned versions ({last_line(output)})" if status else ""


def installed() -> list[Path]:
    """Packages in `.venv`."""
    return list(VENV.glob("lib/python*/site-packages/*.dist-info"))


def stage(output: str, before: int) -> str:
    """State of a `pip install`, read off what it has printed and what is in `.venv`.

    Args:
        output: of pip.
        before: number of packages that were there before.
    """
    listed = re.search(r"^Installing collected packages: (.*)$", output, re.MULTILINE)
    if listed:
        count = listed[1].count(",") + 1
        return f"installing {min(max(len(installed()) - before, 1), count)} of {count} packages"
    fetched = re.findall(r"^(?:Collecting|Processing) (\S+)", output, re.MULTILINE)
    if not fetched:
        return "starting pip"
    name = re.split(r"[<>=!~;[]|-\d", fetched[-1].rpartition("/")[2])[0]
    return f"fetching {name}, package {len(fetched)}"


def borrow() -> None:
    """Point `.venv/bin/python` and `parity` at the interpreter that has everything."""
    PYTHON.parent.mkdir(parents=True, exist_ok=True)
    scripts = {
        "python": f'{BORROWED}exec "{sys.executable}" "$@"\n',
        # -P: a file called parity.py in the caller's folder must not win over the package.
        "parity": f'{BORROWED}PYTHONPATH="{ROOT}${{PYTHONPATH:+:$PYTHONPATH}}" '
        f'exec "{sys.executable}" -P -m twinstep.parity "$@"\n',
    }
    for name, text in scripts.items():
        script = PYTHON.with_name(name)
        # Unlink first: in a virtual environment `python` is a link to the real interpreter.
        script.unlink(missing_ok=True)
        script.write_text(text)
        script.chmod(0o755)


def run(
    command: Sequence[str],
    seconds: float = float("inf"),
    told: Callable[[str], None] = lambda text: None,
) -> tuple[int, str]:
    """Exit status and combined output of a command; never raises for a failure.

    Args:
        command: its words.
        seconds: limit of its time.
        told: called with the output so far, about once a second.
    """
    # Ctrl-C must not come between the start of the process and our hold of it.
    late: list[int] = []
    usual = signal.signal(signal.SIGINT, lambda number, _: late.append(number))
    try:
        # A session of its own: what the command has started can be killed with it.
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return 127, str(error)
    finally:
        signal.signal(signal.SIGINT, usual)
    started, output = time.monotonic(), b""
    with child:
        assert child.stdout is not None
        try:
            if late:
                raise KeyboardInterrupt
            while True:
                if select.select([child.stdout], [], [], 1.0)[0]:
                    more = os.read(child.stdout.fileno(), 1 << 16)
                    if not more:
                        break
                    output += more
                told(output.decode(errors="replace"))
                if time.monotonic() - started > seconds:
                    os.killpg(child.pid, signal.SIGKILL)
                    return 124, f"no answer within {seconds:g} s"
        except KeyboardInterrupt:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise
    return child.returncode, output.decode(errors="replace")


def last_line(output: str) -> str:
    """The line that tells most: the last one that starts with ERROR, else the last one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no output"])[-1].rstrip(".")[:300]


if __name__ == "__main__":
    sys.exit(main())
