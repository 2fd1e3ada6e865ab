"""What set-up asks of the outside world, and nothing of what it makes of the answers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Answer:
    """Exit status and combined output of a command; 124 where it ran past its limit."""

    status: int
    output: str


@dataclass(frozen=True)
class Machine:
    """The questions that set-up asks of the machine; a test answers them in its place.

    Attributes:
        root: the checkout.
    """

    root: Path

    def run(self, command: Sequence[str], seconds: float | None = None) -> Answer:
        """Run a command without a terminal and return its answer; never raises for a failure."""
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Answer(124, f"no answer within {seconds:g} s")
        except OSError as error:
            return Answer(127, str(error))
        return Answer(done.returncode, done.stdout)

    def interpreter(self) -> str:
        """The interpreter under which this runs; outside our own `.venv` if it runs in there."""
        inside = Path(sys.prefix).resolve() == (self.root / ".venv").resolve()
        base: str = getattr(sys, "_base_executable", sys.executable)
        return base if inside else sys.executable

    def has_gpu(self) -> bool:
        """Whether an NVIDIA driver shows a device."""
        return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None

    def has_compiler(self) -> bool:
        """Whether Triton would find a C compiler, looking where it looks."""
        return bool(os.environ.get("CC")) or any(map(shutil.which, ("clang", "gcc")))

    def has_python_header(self) -> bool:
        """Whether this interpreter's Python.h is there for that compiler."""
        return Path(sysconfig.get_path("include"), "Python.h").exists()
