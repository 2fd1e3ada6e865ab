"""The map of the house, docs/guide/house.md: floors from import contracts, rooms from docstrings.

`python -m tools.house` renews what stands between its marks; a test holds the page to the tree.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from tools.source import ROOT, python_files

PAGE = ROOT / "docs" / "guide" / "house.md"
MARKED = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def floors(contract: str) -> str:
    """The layers of one import contract, from top to bottom; rooms of one floor share a line."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each["name"] == contract)
    names = [re.sub(r"twinstep\.(parity\.)?", "", layer) for layer in layers]
    return "\n".join(f"    {name.replace(' | ', '   ')}" for name in names)


def rooms() -> str:
    """A row for each package: first sentence of its docstring, and its modules."""
    rows = ["| room | what is in it | files |", "| --- | --- | --- |"]
    homes: dict[Path, list[str]] = {}
    for path in python_files():
        if (ROOT / path.parent / "__init__.py").exists() and path.parts[0] != "twinstep":
            homes.setdefault(path.parent, []).append(path.stem)
    for home, names in sorted(homes.items()):
        doc = ast.get_docstring(ast.parse((ROOT / home / "__init__.py").read_text())) or ""
        listed = " ".join(name for name in sorted(names) if not name.startswith("__"))
        rows.append(f"| `{home}/` | {doc.splitlines()[0]} | {listed} |")
    return "\n".join(rows)


def rendered(page: str) -> str:
    """The page with its generated parts made anew."""
    parts = {
        "floors": lambda: floors("dependencies point one way"),
        "judge": lambda: floors("inside the judge, folders import downwards"),
        "rooms": rooms,
    }
    return MARKED.sub(lambda match: match[1] + parts[match[2]]() + "\n" + match[3], page)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
