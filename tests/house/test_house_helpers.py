"""Functions that several tests need lie in tests/helpers and tests/oracles, not in a test."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from tools.source import ROOT

TESTS = ROOT / "tests"


def imported_tests(file: Path) -> list[str]:
    """Test modules that a file imports."""
    tree = ast.parse(file.read_text())
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = [node.module or "" for node in froms]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return [name for name in names if name.rpartition(".")[2].startswith("test_")]


def test_no_test_imports_another(tmp_path: Path) -> None:
    found = {file.name: imported_tests(file) for file in TESTS.rglob("*.py")}
    assert {name: others for name, others in found.items() if others} == {}
    (tmp_path / "x.py").write_text("from tests.test_a import b\nimport tests.c.test_d\n")
    assert imported_tests(tmp_path / "x.py") == ["tests.test_a", "tests.c.test_d"]


def test_files_have_names_of_their_own_and_folders_are_no_packages() -> None:
    """With an `__init__.py`, tests/reference would hide the package of that name."""
    names = Counter(file.name for file in TESTS.rglob("*.py"))
    assert "__init__.py" not in names
    assert [name for name, count in names.items() if count > 1] == []
