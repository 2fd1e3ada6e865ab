"""The kernels of the corpus, by kind; importing this package enters them all."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

MODULES = (
    "elementwise",
    "numbers",
    "integers",
    "reductions",
    "scans",
    "rows",
    "control",
    "shuffles",
    "atomics",
    "packed",
    "own",
    "cuda",
)


def load() -> list[ModuleType]:
    """Import every module of kernels."""
    return [import_module(f"{__name__}.{name}") for name in MODULES]
