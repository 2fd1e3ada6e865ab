"""The kernels of the corpus, by kind; `load` enters them all."""

from __future__ import annotations

from collections.abc import Iterable
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
    "cuda",
)


def load(also: Iterable[str] = ()) -> list[ModuleType]:
    """Import every module of kernels, and `also` these of other projects."""
    return [*(import_module(f"{__name__}.{name}") for name in MODULES), *map(import_module, also)]
