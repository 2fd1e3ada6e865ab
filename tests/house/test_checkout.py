"""Every package is `twinstep.<name>` from this checkout, and refuses its bare name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from tools.source import ROOT

PACKAGES = sorted(path.name for path in (ROOT / "twinstep").iterdir() if path.is_symlink())


def test_the_packages_of_the_house_are_all_here() -> None:
    assert {"fast", "parity", "reference", "scenarios"} <= set(PACKAGES)


@pytest.mark.parametrize("name", PACKAGES)
def test_package_lies_in_this_checkout(name: str) -> None:
    file = importlib.import_module(f"twinstep.{name}").__file__
    assert file is not None, f"{name} has no __init__.py"
    assert Path(file).resolve().parent == ROOT / name, f"{name} came from {file}, not {ROOT / name}"


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_under_its_bare_name_is_refused_in_one_sentence(name: str) -> None:
    """Else a module would exist twice, with two sets of classes."""
    sys.modules.pop(name, None)
    with pytest.raises(ImportError, match=f"^import twinstep.{name}, not {name}$"):
        importlib.import_module(name)
