"""Who may import whom: scenarios → parity → golden | fast | reference | replay.

import-linter holds the same arrows (pyproject.toml). This reader sees more: imports by
`import_module`, relative ones, and for `reference` whatever is not torch or standard library.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from tools.source import imports

# Package → our packages that it must not import.
STRANGERS = {
    "reference": {"benchmarks", "fast", "golden", "parity", "replay", "scenarios", "tools"},
    "golden": {"benchmarks", "fast", "parity", "reference", "replay", "scenarios", "tools"},
    "fast": {"benchmarks", "golden", "parity", "reference", "replay", "scenarios", "tools"},
    "replay": {"benchmarks", "golden", "parity", "reference", "scenarios", "tools"},
    "parity": {"benchmarks", "scenarios", "tools"},
    "scenarios": {"benchmarks", "tools"},
    "benchmarks": {"tools"},
}
# The composition root, the one module that may know everything.
EXCEPTIONS = {Path("parity/__main__.py"): {"benchmarks", "scenarios"}}


def violations(path: Path, tree: ast.Module) -> list[str]:
    """The imports of one file that the arrows forbid, one sentence for each."""
    package = path.parts[0]
    found = []
    for item in imports(tree):
        top = item.module.removeprefix("twinstep.").split(".")[0]
        where = f"{path}:{item.line}"
        if item.module.startswith("."):
            found.append(f"{where} imports {item.module} relatively; imports are absolute")
        elif top in STRANGERS.get(package, set()) - EXCEPTIONS.get(path, set()):
            found.append(f"{where} imports {item.module}; {package} must not know {top}")
        elif package == "reference" and not _reference_may_import(top):
            found.append(
                f"{where} imports {item.module}; reference imports torch, the standard library "
                "and itself"
            )
    return found


def _reference_may_import(top: str) -> bool:
    return top in ("torch", "twinstep", "reference") or top in sys.stdlib_module_names
