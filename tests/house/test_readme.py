"""The README's instructions for a new user work unchanged."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.source import ROOT, project_files

README = (ROOT / "README.md").read_text()
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)


def example() -> str:
    """The kernel in the README's tour."""
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return str(code)


def check(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Write a kernel outside the checkout and have it judged, as a user would."""
    (folder / "my_kernel.py").write_text(code)
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from twinstep.parity.cli.app import main\nmain()"
    )
    return subprocess.run(
        [sys.executable, "-P", "-c", program, "check", "my_kernel.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_kernel_of_the_tour_is_accepted(tmp_path: Path) -> None:
    done = check(tmp_path, example())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "my_cast" in done.stdout


def test_the_kernel_of_the_tour_with_a_bug_is_rejected(tmp_path: Path) -> None:
    truncated = example().replace("copy.copy_(source)", "copy.copy_(source * 1.01)")
    assert truncated != example()
    done = check(tmp_path, truncated)
    assert done.returncode == 1, done.stdout + done.stderr
    assert list((tmp_path / "parity_repros").glob("repro_*.py"))


@pytest.mark.parametrize("page", [p for p in project_files() if p.suffix == ".md"], ids=str)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = LINK.findall(CODE.sub("", (ROOT / page).read_text()))
    broken = [target for target in targets if not (ROOT / page.parent / target).exists()]
    assert not broken
