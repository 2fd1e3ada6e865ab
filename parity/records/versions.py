"""Versions of packages, found without importing them."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

OURS = "twinstep"
PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def version_of(package: str) -> str:
    """Version of a package; "" if it is not installed. Ours may be a checkout that is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        if package != OURS:
            return ""
    return str(tomllib.loads(PROJECT.read_text())["project"]["version"])
