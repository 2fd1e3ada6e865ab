"""The page of outcomes, docs/reference/compat.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from twinstep.parity.proof.compat.cases import Outcome

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "reference" / "compat.md"
HEAD = """# Other projects' tests

`make compat` writes this page: tests of torch, DeepSpeed and apex with classes of ours, on the CPU,
the fast side on replay. torch {torch} ships `optim_db`, the table that its optimizer tests are made
from, which is run as it is; each of its inputs also goes through checks of torch's `test_optim`,
written anew. Wheels and sources in package registries hold no optimizer tests of DeepSpeed's, and
nothing of apex: those are written anew from the numbers that they document. Where DeepSpeed 0.19.8
is installed, `make peers` runs its tests on its own classes, too; "(main)" are tests of its main
branch, which is newer. A case runs on both sides; it passes if the outcome is that of the original.
Any other failure than those listed is exit code 1.

| project | runs | as there | otherwise, on purpose |
| --- | --- | --- | --- |
"""


def page(found: Sequence[Outcome]) -> str:
    """The page: counts by project and by test, then every case that ends otherwise."""
    lines = [_counts(project, _of(found, project)) for project in _projects(found)]
    for project in _projects(found):
        rows = _of(found, project)
        lines += ["", f"## {project}", "", "| test | runs | as there |", "| --- | --- | --- |"]
        for test in dict.fromkeys(one.test for one in rows):
            own = [one for one in rows if one.test == test]
            lines.append(f"| {test} | {len(own)} | {_passed(own)} |")
        lines += ["", "| test | case | here | side |", "| --- | --- | --- | --- |", *_others(rows)]
    return HEAD.format(torch=torch.__version__.split("+")[0]) + "\n".join(lines) + "\n"


def _projects(found: Iterable[Outcome]) -> list[str]:
    return list(dict.fromkeys(one.project for one in found))


def _of(found: Iterable[Outcome], project: str) -> list[Outcome]:
    return [one for one in found if one.project == project]


def _passed(rows: Iterable[Outcome]) -> int:
    return sum(one.passed for one in rows)


def _counts(project: str, rows: Sequence[Outcome]) -> str:
    passed = _passed(rows)
    return f"| {project} | {len(rows)} | {passed} | {len(rows) - passed} |"


def _others(rows: Iterable[Outcome]) -> list[str]:
    """A line for each case that ends otherwise, on both sides or one after the other."""
    sides: dict[tuple[str, str, str], list[str]] = {}
    for one in rows:
        if not one.passed:
            sides.setdefault((one.test, one.case, one.why), []).append(one.side)
    return [
        f"| {test} | {case} | {why} | {' and '.join(dict.fromkeys(named))} |"
        for (test, case, why), named in sides.items()
    ]
