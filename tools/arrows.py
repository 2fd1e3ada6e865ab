"""Who may import whom: scenarios → parity → golden | fast | reference → contract.

import-linter holds the same arrows (pyproject.toml). This reader sees more: imports by
`import_module`, relative ones, and in `contract` and
`reference` whatever is neither torch nor standard library.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from tools.source import imports

# Package → our packages that it must not import.
STRANGERS = {
    "contract": {"benchmarks", "fast", "golden", "parity", "reference", "scenarios", "tools"},
    "reference": {"benchmarks", "fast", "golden", "parity", "scenarios", "tools"},
    "golden": {"benchmarks", "fast", "parity", "reference", "scenarios", "tools"},
    "fast": {"benchmarks", "golden", "parity", "reference", "scenarios", "tools"},
    "parity": {"benchmarks", "scenarios", "tools"},
    "scenarios": {"benchmarks", "tools"},
    "benchmarks": {"tools"},
}
# Packages without dependencies → what they may import beside the standard library.
PLAIN = {"contract": ("torch", "contract"), "reference": ("torch", "contract", "reference")}
# The composition root, the one module that may know everything.
EXCEPTIONS = {Path("parity/__main__.py"): {"benchmarks", "scenarios"}}


def violations(path: Path, tree: ast.Module) -> list[str]:
    """The imports of one file that the arrows forbid, one sentence for each."""
    package = path.parts[0]
    found = []
    for item in imports(tree):
        top = item.module.split(".")[0]
        where = f"{path}:{item.line}"
        if item.module.startswith("."):
            found.append(f"{where} imports {item.module} relatively; imports are absolute")
        elif top in STRANGERS.get(package, set()) - EXCEPTIONS.get(path, set()):
            found.append(f"{where} imports {item.module}; {package} must not know {top}")
        elif package in PLAIN and not _may_import(PLAIN[package], top):
            found.append(
                f"{where} imports {item.module}; {package} imports the standard library and "
                f"{', '.join(PLAIN[package])}"
            )
    return found


def _may_import(known: tuple[str, ...], top: str) -> bool:
    return top in known or top in sys.stdlib_module_names
