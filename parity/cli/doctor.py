"""`parity doctor`: what this machine can judge, and what is missing."""

from __future__ import annotations

import shutil

import torch
from rich.console import Console

from twinstep.parity.records.errors import EXIT_KEPT, EXIT_USAGE
from twinstep.parity.records.names import ENGINES
from twinstep.parity.registry.engines import engine_named, live_subnormals
from twinstep.parity.report.exports import environment
from twinstep.parity.report.words import print_hanging

COMPILERS = ("g++", "clang++", "c++")


def print_doctor() -> int:
    """Print the state of the machine; exit code 0, or 2 if nothing can be judged here."""
    found = environment()
    for name in ("python", "torch", "triton", "numpy"):
        _print(name, found[name] or "missing")
    _print("threads", str(torch.get_num_threads()))
    _print("GPU", found["gpu"] or "none: GPU kernels run on replay")
    compiler = next((path for path in map(shutil.which, COMPILERS) if path), None)
    _print("compiler", compiler or "none: C++ kernels are skipped")
    for name in ENGINES:
        missing = engine_named(name).missing or _replay_fault(name)
        _print("engine", f"{name}: {missing or 'ready'}")
    alive = live_subnormals()
    _print("subnormals", "live" if alive else "flushed to zero: nothing is judged")
    return EXIT_KEPT if alive else EXIT_USAGE


def _print(name: str, text: str) -> None:
    print_hanging(Console(), f"{name:<12} ", text.split())


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
