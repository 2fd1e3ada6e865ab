"""Ratios in the README are those of a results file, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.source import ROOT

RESULTS = ROOT / "benchmarks" / "results"
RATIO = re.compile(
    r"(\d+(?:\.\d+)?)(?: times (?:as|faster|slower|less|more|the)\b| ?[x×](?![\w(]))"
)
# Comparisons that no file can hold to the digit.
VAGUE = re.compile(
    r"\b(?:twice|thrice|half) (?:as|the (?:time|speed))|\d ?% (?:faster|slower)|\d-?fold\b", re.I
)
FILE = re.compile(r"benchmarks/results/[\w./-]+\.json")


def claimed(text: str) -> list[tuple[str, list[str]]]:
    """Every ratio in a text, with the results files that its paragraph or item names."""
    parts = re.split(r"\n\s*\n|\n(?=- )", text)
    return [(hit[1], FILE.findall(part)) for part in parts for hit in RATIO.finditer(part)]


def numbers(value: object, name: str = "") -> Iterator[float]:
    """Numbers of a results file whose name, or that of their list, has "ratio" or "times"."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers(inner, name)
    elif isinstance(value, int | float) and ("ratio" in name or "times" in name):
        yield float(value)


def unfounded(text: str, root: Path = ROOT) -> list[str]:
    """A sentence for every ratio that no named results file holds, to the digits that are given."""
    wrong = []
    for ratio, files in claimed(text):
        digits = len(ratio.partition(".")[2])
        held = [x for file in files for x in numbers(json.loads((root / file).read_text()))]
        if not any(f"{x:.{digits}f}" == ratio for x in held):
            wrong.append(f"{ratio} is in none of {files or 'the results files: none is named'}")
    return wrong


def test_every_ratio_of_the_readme_is_in_the_results_file_that_it_names() -> None:
    text = (ROOT / "README.md").read_text()
    assert claimed(text), "the README states no ratio: is the pattern blind?"
    assert not unfounded(text)


def test_no_comparison_of_the_readme_is_without_a_ratio() -> None:
    assert not VAGUE.findall((ROOT / "README.md").read_text())


@pytest.mark.parametrize(
    "text", ["twice as fast", "in half the time", "20% faster", "a 3-fold gain"]
)
def test_a_comparison_without_a_ratio_is_seen(text: str) -> None:
    assert VAGUE.search(text)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with one results file."""
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text(
        '{"step": {"ratio": 6.089, "ms": 2.0}, "rows": [{"ratio": 3.0}]}'
    )
    return tmp_path


@pytest.mark.parametrize(
    "text",
    [
        "6.1 times as fast (`benchmarks/results/a.json`)",
        "It is 3x faster (benchmarks/results/a.json).",
        "- 2 cores\n- 6.09 times faster: benchmarks/results/a.json",
    ],
)
def test_what_a_file_holds_may_be_stated(text: str, project: Path) -> None:
    assert claimed(text)
    assert unfounded(text, project) == []


@pytest.mark.parametrize(
    "text",
    [
        "6.2 times as fast (`benchmarks/results/a.json`)",
        "6.1 times as fast",
        "2× (benchmarks/results/a.json)",
        "- benchmarks/results/a.json\n- 6.1 times the speed",
    ],
)
def test_what_no_named_file_holds_may_not(text: str, project: Path) -> None:
    assert len(unfounded(text, project)) == 1
