"""The pages that take a training loop here: every block is run, and prints what the page says."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import twinstep.replay
from tools.source import ROOT
from twinstep.contract.compat import Compat

BLOCK = re.compile(r"```python\n# (\S+\.py)\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
PAGES = {
    "from-pytorch.md": ["problem.py", "plain.py", "half.py", "resume.py", "brain.py"],
    "from-deepspeed.md": ["config.py", "several.py", "direct.py", "differs.py", "load.py"],
    "frameworks.md": ["problem.py", "fsdp.py", "lit.py", "quick.py", "hf.py"],
    "simulated-ranks.md": ["ranks.py"],
    "zero.md": ["sharded.py", "train_zero.py"],
}
# Packages that set-up does not install; their programs run where they are.
NEEDS = {"lit.py": "lightning", "quick.py": "accelerate", "hf.py": "transformers"}
Capture = pytest.CaptureFixture[str]


def blocks(page: str) -> list[tuple[str, str, str]]:
    """File name, code, and what the page says is printed."""
    return BLOCK.findall((ROOT / "docs" / "guide" / page).read_text())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder from which programs run, as a user would run them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    try:
        yield tmp_path
    finally:
        for name in {Path(file).stem for row in PAGES.values() for file in row} - known:
            sys.modules.pop(name, None)
        while twinstep.replay.active():  # each program switches it on
            twinstep.replay.deactivate()


@pytest.mark.parametrize("page", PAGES)
def test_the_page_has_its_programs_and_no_other_code(page: str) -> None:
    assert [name for name, _, _ in blocks(page)] == PAGES[page]
    assert (ROOT / "docs" / "guide" / page).read_text().count("```") == sum(
        4 if said else 2 for _, _, said in blocks(page)
    )


def test_the_page_has_every_field_of_compat_and_no_other() -> None:
    text = (ROOT / "docs" / "guide" / "from-deepspeed.md").read_text()
    table = text[text.index("| field | theirs") : text.index("# differs.py")]
    named = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert named == [field.name for field in fields(Compat)]


@pytest.mark.parametrize("page", PAGES)
def test_every_program_prints_what_the_page_says(page: str, folder: Path, capsys: Capture) -> None:
    for name, code, _ in blocks(page):
        (folder / name).write_text(code)
    for name, _, said in blocks(page):
        if name not in NEEDS:
            runpy.run_path(name, run_name="__main__")
            assert capsys.readouterr().out == said, name


@pytest.mark.filterwarnings("ignore")  # other packages warn about themselves
@pytest.mark.parametrize("name", NEEDS)
def test_every_program_of_a_trainer_ends_with_what_the_page_says(
    name: str, folder: Path, capsys: Capture
) -> None:
    pytest.importorskip(NEEDS[name], reason=f"make setup does not install {NEEDS[name]}")
    for file, code, _ in blocks("frameworks.md"):
        (folder / file).write_text(code)
    runpy.run_path(name, run_name="__main__")
    said = {file: text for file, _, text in blocks("frameworks.md")}[name]
    assert said
    assert capsys.readouterr().out.endswith(said)
