"""The plain package names belong to nobody: whatever is installed, ours lie in this checkout."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tools.source import ROOT

PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))


def test_the_packages_of_the_house_are_all_here() -> None:
    assert {"fast", "parity", "reference", "scenarios"} <= set(PACKAGES)


@pytest.mark.parametrize("name", PACKAGES)
def test_package_lies_in_this_checkout(name: str) -> None:
    file = importlib.import_module(name).__file__
    assert file is not None, f"{name} has no __init__.py"
    assert Path(file).resolve().parent == ROOT / name, f"{name} came from {file}, not {ROOT / name}"


def test_no_test_folder_shadows_a_package() -> None:
    """A package tests/reference/ would be imported in place of the one of that name."""
    assert not list((ROOT / "tests").rglob("__init__.py"))
