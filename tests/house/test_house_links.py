"""Links between the pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.source import ROOT, project_files

LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)


@pytest.mark.parametrize("page", [p for p in project_files() if p.suffix == ".md"], ids=str)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = LINK.findall(CODE.sub("", (ROOT / page).read_text()))
    broken = [target for target in targets if not (ROOT / page.parent / target).exists()]
    assert not broken
