"""One set of commands: Makefile, CONTRIBUTING's table, commit hook and CI name the same ones."""

from __future__ import annotations

import os
import re

from tools.source import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
ROW = re.compile(r"^\| `make ([a-z-]+)[^`]*` \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def targets(makefile: str) -> set[str]:
    """Targets with a `## help` text, which are those that users are told of."""
    return set(re.findall(r"^([a-z-]+):.*##", makefile, re.MULTILINE))


def phony(makefile: str) -> set[str]:
    """Targets declared not to be files."""
    declared = re.search(r"^\.PHONY:(.*)$", makefile, re.MULTILINE)
    return set(declared[1].split()) if declared else set()


def test_the_table_in_contributing_lists_exactly_the_targets() -> None:
    rows = ROW.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert {name for name, _, _ in rows} == targets(MAKEFILE)
    assert len(rows) == len(targets(MAKEFILE)), "a target stands twice in the table"


def test_every_row_has_contents_and_a_time_limit() -> None:
    for name, contents, limit in ROW.findall((ROOT / "CONTRIBUTING.md").read_text()):
        assert contents.strip(), name
        assert re.search(r"\d+ (s|min)|none", limit), f"{name} has no time limit: {limit}"


def test_every_target_is_phony_and_explained() -> None:
    assert phony(MAKEFILE) == targets(MAKEFILE)


def test_a_target_without_help_is_found() -> None:
    assert targets(MAKEFILE + "\nnew:\n\ttrue\n") == targets(MAKEFILE)
    assert "new" in targets(MAKEFILE + "\nnew:  ## something\n\ttrue\n")
    assert phony(".PHONY: one two\n") == {"one", "two"}


def test_ci_and_the_commit_hook_run_the_make_targets() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    made = ["lint", "parity", "test DONE=--ignore=tests/house"]
    assert re.findall(r"^make (.*)$", ci, re.MULTILINE) == made
    hooks = re.findall(r"entry: (.*)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hooks == ["make lint"]


def test_the_gate_is_what_ci_runs() -> None:
    assert re.search(r"^check: lint parity test\b", MAKEFILE, re.MULTILINE)
    assert re.findall(r"^(.*DONE) =(.*)$", MAKEFILE, re.MULTILINE) == [
        ("DONE", ""),
        ("check: DONE", " --ignore=tests/house"),
    ]
    lint = MAKEFILE.partition("\nlint:")[2].partition("\n\n")[0]
    assert lint.endswith("$(PY) -m pytest -q $(WORKERS) tests/house"), "nothing is left out there"


def test_readme_names_only_commands_that_exist() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "docs/guide/reading-order.md"):
        used = set(re.findall(r"`make ([a-z-]+)", (ROOT / name).read_text()))
        assert used <= targets(MAKEFILE), f"{name} names {used - targets(MAKEFILE)}"
