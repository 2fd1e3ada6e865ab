"""Imports that import-linter cannot forbid: whatever is not torch, and names in calls.

The arrows themselves are contracts in pyproject.toml.
"""

from __future__ import annotations

import ast
import sys

import pytest

from tools.source import parse, python_files

ALLOWED = {"reference", "contract", "torch", *sys.stdlib_module_names}
# Package → those above it, of which it must not know at run time either.
ABOVE = {
    "golden": {"benchmarks", "fast", "parity", "reference", "scenarios", "tools"},
    "parity": {"benchmarks", "scenarios", "tools"},
    "scenarios": {"benchmarks", "tools"},
}


def package(module: str) -> str:
    """First name of a module, that of the project apart."""
    return module.removeprefix("twinstep.").split(".")[0]


def foreign(tree: ast.Module) -> set[str]:
    """Modules that the reference must not import."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return {name for name in found if package(name) not in ALLOWED}


def dynamic(tree: ast.Module) -> set[str]:
    """Packages imported by a call that no contract can see; "" if the name is computed."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            argument = node.args[0]
            name = argument.value if isinstance(argument, ast.Constant) else ""
            if ast.unparse(node.func).split(".")[-1] in ("__import__", "import_module"):
                found.add(package(str(name)))
    return found


def test_reference_imports_torch_and_the_standard_library_alone() -> None:
    found = {str(path): foreign(parse(path)) for path in python_files("reference")}
    assert found
    assert not {path: names for path, names in found.items() if names}


def test_neither_side_imports_by_a_call() -> None:
    files = python_files("reference", "fast")
    assert not {str(path): names for path in files if (names := dynamic(parse(path)))}


def test_no_call_imports_what_stands_above() -> None:
    found = {path: dynamic(parse(path)) & ABOVE[path.parts[0]] for path in python_files(*ABOVE)}
    assert not {str(path): names for path, names in found.items() if names}


@pytest.mark.parametrize(
    "code",
    [
        "import numpy",
        "import torch, triton.language as tl",
        "from hypothesis import given",
        "def f():\n    from twinstep.fast.kernels.adam import adam_step_",
        "from . import clip",
    ],
)
def test_a_planted_import_is_found(code: str) -> None:
    assert foreign(ast.parse(code))
    assert not foreign(ast.parse("import math\nimport torch.optim\nfrom reference import clip"))


def test_a_planted_call_is_found() -> None:
    assert dynamic(ast.parse("importlib.import_module('twinstep.golden.trace')")) == {"golden"}
    assert dynamic(ast.parse("x = __import__('fast')")) == {"fast"}
    assert dynamic(ast.parse("import_module(f'fast.{name}')")) == {""}
