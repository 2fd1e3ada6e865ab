"""Make `.venv` ready: pinned versions where a package registry answers, installed ones elsewhere.

Two outcomes, told apart by the stamp `.venv/twinstep.json`:

- pinned: an ordinary virtual environment, filled by one `pip install` under constraints.txt.
- installed: `.venv/bin/python` is a two-line script that starts an interpreter which already has
  torch and triton. Nothing is downloaded. (A virtual environment with system site-packages would
  not do: one made from another virtual environment sees the system's packages, not its parent's.)

Everything that asks the outside world goes through `Machine`, so that tests can answer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.machine import Machine
from tools.requirements import OPTIONAL, REQUIRED, unsuitable

ROOT = Path(__file__).resolve().parents[1]
# What decides the outcome: when one of these changes, set-up runs again.
RECIPE = ("constraints.txt", "pyproject.toml", "tools/environment.py", "tools/requirements.py")
# The smallest pinned package: fetching it tells whether a registry answers.
PROBE = "iniconfig"
PROBE_SECONDS = 20
IMPORTS = "import hypothesis, numpy, pytest, rich, torch, triton, triton.compiler, typer"
SURVEY = """
import importlib.metadata as m, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


class Refusal(Exception):
    """Set-up cannot go on. The message is one sentence that ends in what to do."""


@dataclass(frozen=True)
class Outcome:
    """What a finished set-up left behind.

    Attributes:
        recipe: digest of everything that decided it.
        mode: "pinned" or "installed".
        reason: why not pinned; "" if pinned.
        python: the interpreter behind `.venv/bin/python`.
        found: version by package name, of the required and the optional ones.
    """

    recipe: str
    mode: str
    reason: str
    python: str
    found: dict[str, str]

    @property
    def absent(self) -> list[str]:
        """The optional packages that are not there."""
        return [name for name in OPTIONAL if name not in self.found]


@dataclass(frozen=True)
class Environment:
    """One checkout's environment.

    Attributes:
        root: the checkout.
        machine: who answers questions about the outside world.
        choice: "auto", "pinned" or "installed".
        insist: an earlier set-up under another interpreter does not do.
    """

    root: Path
    machine: Machine
    choice: str = "auto"
    insist: bool = False

    @property
    def folder(self) -> Path:
        """`.venv` of the checkout."""
        return self.root / ".venv"

    @property
    def python(self) -> Path:
        """The one interpreter path that the Makefile knows."""
        return self.folder / "bin" / "python"

    @property
    def stamp(self) -> Path:
        """Where the outcome of the last finished set-up is written."""
        return self.folder / "twinstep.json"

    def recipe(self) -> str:
        """Digest of the files that decide what set-up does."""
        digest = hashlib.sha256()
        for name in RECIPE:
            digest.update((self.root / name).read_bytes())
        return digest.hexdigest()

    def last(self) -> Outcome | None:
        """What the last finished set-up left, whether or not it still holds."""
        try:
            return Outcome(**json.loads(self.stamp.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def stamped(self) -> Outcome | None:
        """The last outcome if it still holds."""
        outcome = self.last()
        if outcome is None or outcome.recipe != self.recipe():
            return None
        if self.insist and outcome.python != self.machine.interpreter():
            return None
        holds = os.access(self.python, os.X_OK) and self.choice in ("auto", outcome.mode)
        return outcome if holds else None

    def set_up(self) -> Outcome:
        """Bring `.venv` into its state and return the outcome; instant where the stamp holds.

        Raises:
            Refusal: nothing on this machine can run the project.
        """
        outcome = self.stamped()
        if outcome:
            return outcome
        self._require_compiler()
        python = self.machine.interpreter()
        found = self.survey(python)
        lacking = unsuitable(found)
        if self.choice == "installed":
            if lacking:
                raise Refusal(f"{self._here()} cannot be used as it is ({lacking}): {REMEDY}")
            reason = "as asked"
        else:
            reason = self._install(lacking)
        if reason:
            self._borrow()
        else:
            found = self.survey(str(self.python))
        mode = "installed" if reason else "pinned"
        outcome = Outcome(self.recipe(), mode, reason, python, found)
        self.stamp.write_text(json.dumps(asdict(outcome), indent=1) + "\n")
        return outcome

    def survey(self, python: str) -> dict[str, str]:
        """Versions of our packages under an interpreter, without importing them."""
        answer = self.machine.run([python, "-c", SURVEY, *REQUIRED, *OPTIONAL])
        return dict(json.loads(answer.output)) if answer.status == 0 else {}

    def _install(self, lacking: str) -> str:
        """Try the pinned way; return "" or why the installed packages have to do."""
        may_borrow = not lacking and self.choice == "auto"
        if may_borrow and not self._registry_answers():
            return "pip reaches no package registry"
        problem = self._make_venv() or self._pip_install()
        if problem and not may_borrow:
            other = f", and {self._here()} has {lacking}" if lacking else ""
            raise Refusal(f"{problem}{other}: {REMEDY}")
        return problem

    def _make_venv(self) -> str:
        """Create the virtual environment; return "" or what is wrong."""
        python = self.machine.interpreter()
        if self.machine.run([python, "-c", "import venv, ensurepip"]).status:
            return f"{self._here()} has no complete venv module (Debian: apt install python3-venv)"
        last = self.last()
        # A venv that somebody else made is filled, never emptied.
        stale = is_borrowed(self.python) or (last is not None and last.python != python)
        command = [python, "-m", "venv", *(["--clear"] if stale else []), str(self.folder)]
        answer = self.machine.run(command)
        return f"{' '.join(command)} failed: {last_line(answer.output)}" if answer.status else ""

    def _registry_answers(self) -> bool:
        """Whether pip, configured as it is on this machine, can fetch one small pinned package."""
        with tempfile.TemporaryDirectory() as folder:
            command = [self.machine.interpreter(), "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--timeout", "5", "--retries", "0", "--dest", folder]
            command += ["--constraint", str(self.root / "constraints.txt"), PROBE]
            return self.machine.run(command, PROBE_SECONDS).status == 0

    def _pip_install(self) -> str:
        """One `pip install` of everything, pinned; return "" or pip's own last word."""
        print("set-up: installing the pinned versions into .venv", flush=True)
        command = [str(self.python), "-m", "pip", "install", "--quiet", "--retries", "2"]
        command += ["--no-compile"]
        command += ["--constraint", str(self.root / "constraints.txt")]
        command += ["--editable", f"{self.root}[dev]"]
        answer = self.machine.run(command)
        if answer.status == 0:
            # Byte-compile what will be imported, not all of torch: a third of the time. -E, because
            # PYTHONDONTWRITEBYTECODE would have every process compile torch anew.
            answer = self.machine.run([str(self.python), "-E", "-c", IMPORTS])
        (self.folder / "setup.log").write_text(answer.output)
        if answer.status == 0:
            return ""
        return f"pip could not install the pinned versions ({last_line(answer.output)})"

    def _borrow(self) -> None:
        """Point `.venv/bin/python` and `parity` at the interpreter that has everything."""
        self.python.parent.mkdir(parents=True, exist_ok=True)
        python, root = self.machine.interpreter(), self.root
        scripts = {
            "python": f'{BORROWED}exec "{python}" "$@"\n',
            # -P: a file called parity.py in the caller's folder must not win over the package.
            "parity": f'{BORROWED}PYTHONPATH="{root}${{PYTHONPATH:+:$PYTHONPATH}}" '
            f'exec "{python}" -P -m twinstep.parity "$@"\n',
        }
        for name, text in scripts.items():
            script = self.python.with_name(name)
            # Unlink first: in a virtual environment `python` is a link to the real interpreter.
            script.unlink(missing_ok=True)
            script.write_text(text)
            script.chmod(0o755)

    def _require_compiler(self) -> None:
        """Refuse where kernels will be launched on a GPU and Triton cannot build its launcher."""
        if not self.machine.has_gpu():
            return
        if not self.machine.has_compiler():
            raise Refusal(
                "this machine has a GPU and no C compiler, which Triton needs to launch kernels: "
                "install gcc or clang, or name one with CC=/path/to/cc."
            )
        if not self.machine.has_python_header():
            raise Refusal(
                f"this machine has a GPU and {self._here()} lacks Python.h, which Triton needs to "
                "launch kernels: install its headers (Debian: apt install python3-dev)."
            )

    def _here(self) -> str:
        return f"Python {sys.version_info[0]}.{sys.version_info[1]} at {self.machine.interpreter()}"


REMEDY = (
    "connect to a package registry, or name a Python 3.11 or newer that has "
    + ", ".join(REQUIRED)
    + " with `make PYTHON=/path/to/python3`."
)
BORROWED = "#!/bin/sh\n# Written by set-up: uses an interpreter that has everything already.\n"


def is_borrowed(python: Path) -> bool:
    """Whether `.venv/bin/python` is our two-line script rather than an interpreter."""
    try:
        return python.read_bytes().startswith(BORROWED.encode())
    except OSError:
        return False


def last_line(output: str) -> str:
    """The line that tells most: the last one that starts with ERROR, else the last one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return ((errors or lines or ["no output"])[-1]).rstrip(".")[:300]


def describe(outcome: Outcome, seconds: float) -> str:
    """What was set up, in one or two lines."""
    found = outcome.found
    versions = ", ".join(f"{name} {found[name]}" for name in ("torch", "triton") if name in found)
    if outcome.mode == "pinned":
        return f"set-up: .venv with {versions}, pinned by constraints.txt ({seconds:.0f} s)"
    text = f"set-up: using {outcome.python} as it is, {versions} ({outcome.reason})"
    left_out = ", ".join(f"{name} ({OPTIONAL[name]})" for name in outcome.absent)
    return f"{text}\nset-up: left out, not installed here: {left_out}" if left_out else text


def main(arguments: Sequence[str] | None = None) -> int:
    """Set up; 0 when `.venv` is ready, 2 and one sentence on standard error when it cannot be."""
    parser = argparse.ArgumentParser(prog="setup_env.py", description="Make .venv ready.")
    parser.add_argument("--choice", choices=("auto", "pinned", "installed"), default="auto")
    parser.add_argument("--need", nargs="*", default=[], choices=sorted(OPTIONAL))
    parser.add_argument("--insist", action="store_true")
    options = parser.parse_args(arguments)
    environment = Environment(ROOT, Machine(ROOT), options.choice, options.insist)
    start, fresh = time.monotonic(), environment.stamped() is None
    try:
        outcome = environment.set_up()
        missing = ", ".join(name for name in options.need if name in outcome.absent)
        if missing:
            raise Refusal(
                f"{missing} not installed under {outcome.python}: install it there, or connect to "
                "a package registry and run `make setup SETUP=pinned`."
            )
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return 2
    if fresh:
        print(describe(outcome, time.monotonic() - start), flush=True)
    return 0
