"""`parity doctor`: what this machine can judge, and what is missing."""

from __future__ import annotations

import shutil
import sys

import torch
from rich.console import Console

from twinstep.parity.records.errors import EXIT_KEPT, EXIT_USAGE
from twinstep.parity.registry.engines import engine_named, live_subnormals
from twinstep.parity.registry.kernels import ENGINES
from twinstep.parity.report.exports import environment

COMPILERS = ("g++", "clang++", "c++")


def print_doctor() -> int:
    """Print the state of the machine; exit code 0, or 2 if nothing can be judged here."""
    screen = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    found = environment()
    for name in ("python", "torch", "triton", "numpy"):
        screen.print(f"{name:<12} {found[name] or 'missing'}")
    screen.print(f"{'threads':<12} {torch.get_num_threads()}")
    screen.print(f"{'GPU':<12} {found['gpu'] or 'none: GPU kernels run on replay'}")
    compiler = next((path for path in map(shutil.which, COMPILERS) if path), None)
    screen.print(f"{'compiler':<12} {compiler or 'none: C++ kernels are skipped'}")
    for name in ENGINES:
        missing = engine_named(name).missing or _replay_fault(name)
        screen.print(f"{'engine':<12} {name}: {missing or 'ready'}")
    alive = live_subnormals()
    screen.print(f"{'subnormals':<12} {'live' if alive else 'flushed to zero: nothing is judged'}")
    return EXIT_KEPT if alive else EXIT_USAGE


def _replay_fault(name: str) -> str:
    """Why replay cannot start, if it cannot."""
    if name != "replay":
        return ""
    try:
        import twinstep.replay

        twinstep.replay.activate()
        twinstep.replay.deactivate()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
