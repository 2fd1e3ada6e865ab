"""Maps of the house: the generated page is current, and no page names a file that is missing."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tools.house import PAGE, floors, rendered
from tools.source import ROOT, parse, project_files

PAGES = [path for path in project_files() if path.suffix == ".md" and path.name != "CHANGELOG.md"]
FOLDERS = {path.parts[0] for path in project_files() if len(path.parts) > 1}
QUOTED = re.compile(r"`([\w./-]+?)(?:::\w+)?`")
LISTED = re.compile(r"^\| `(\w+\.py)`", re.MULTILINE)


def missing(page: Path, text: str) -> list[str]:
    """Files that a page names in backquotes and that are not in the tree.

    A path starts with a folder of the checkout. In the README of a folder, a `name.py` that
    opens a row of a table is a file of that folder.
    """
    paths = [word for word in QUOTED.findall(text) if "/" in word and word.split("/")[0] in FOLDERS]
    found = [path for path in paths if not (ROOT / path).exists()]
    if page.name == "README.md" and page.parent != Path("."):
        here = {path.name for path in (ROOT / page.parent).rglob("*.py")}
        found += [name for name in LISTED.findall(text) if name not in here]
    return found


def test_the_map_is_what_the_tree_is() -> None:
    text = PAGE.read_text()
    assert text == rendered(text), "run python -m tools.house"


def test_the_floors_are_those_of_the_import_contracts() -> None:
    assert floors("dependencies point one way").splitlines()[1].split() == ["benchmarks"]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    assert missing(page, (ROOT / page).read_text()) == []


def differing(names: set[str], text: str) -> set[str]:
    """Names that a list of modules at the left edge of a docstring leaves out, or has too many."""
    return names ^ set(re.findall(r"^(\w+)/?  +\S", text, re.MULTILINE))


@pytest.mark.parametrize("home", ["contract", "contract/checkpoint"])
def test_a_docstring_lists_every_module(home: str) -> None:
    inside = {path.stem for path in (ROOT / home).iterdir() if not path.stem.startswith("__")}
    text = ast.get_docstring(parse(Path(home) / "__init__.py"))
    assert not differing(inside, text or "")


def test_the_readme_of_the_reference_names_every_module() -> None:
    named = set(LISTED.findall((ROOT / "reference" / "README.md").read_text()))
    assert not {path.name for path in (ROOT / "reference").glob("[a-z]*.py")} - named


def test_a_module_that_a_list_leaves_out_is_found() -> None:
    assert differing({"clip", "norm"}, "Words.\n\nclip  of the norm\n") == {"norm"}
    assert differing({"clip"}, "clip  words\nnorm  words") == {"norm"}


def test_a_missing_file_is_found() -> None:
    assert missing(Path("docs/x.md"), "see `reference/adam.py` and `reference/adamw.py`") == [
        "reference/adamw.py"
    ]
    assert missing(Path("reference/README.md"), "| `adam.py` | x |\n| `nothing.py` | y |") == [
        "nothing.py"
    ]
    assert missing(Path("docs/x.md"), "`tests/house/test_house_map.py::test_x` and `a/b`") == []
