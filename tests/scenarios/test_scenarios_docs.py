"""The page of scenarios: its commands exist, its numbers are those of the recorded run."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from twinstep.scenarios.cli import parser
from twinstep.scenarios.model import sizes
from twinstep.scenarios.precision import HELD_OUT, SEEDS, SHAPE, STEPS

DOCS = Path(__file__).resolve().parents[2] / "docs" / "guide"
PAGE = (DOCS / "scenarios.md").read_text()
RESULT = json.loads((DOCS / "scenarios" / "precision.json").read_text())
COMMANDS = re.findall(r"python -m twinstep.scenarios ([a-z][^#`\n]*)", PAGE)


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_of_the_page_exists(words: str) -> None:
    assert parser().parse_args(words.split()).command == words.split()[0]


def test_the_page_has_commands() -> None:
    assert {words.split()[0] for words in COMMANDS} == {
        "lockstep",
        "train",
        "precision",
        "curves",
        "memory",
        "compare",
        "picture",
    }


def test_the_recorded_run_is_the_default_one() -> None:
    elements = sum(math.prod(size) for size in sizes(SHAPE).values())
    assert RESULT["side"] == "fast"
    assert RESULT["parameters"] == elements
    assert RESULT["steps"] == STEPS
    assert RESULT["seeds"] == [*range(SEEDS)]
    assert f"{elements:,} parameters, {STEPS} steps" in PAGE
    assert f"{HELD_OUT * 8 * SHAPE.context:,} bytes of held-out text" in PAGE.replace("\n", " ")


def test_the_recorded_run_reaches_fp32_and_the_page_shows_its_numbers() -> None:
    assert RESULT["reaches"]
    assert RESULT["learned"]
    for row in RESULT["rows"]:
        shown = [f"{value:.4f}" for value in (*row["held_out"], row["mean"], row["spread"])]
        assert re.search(rf"^ *{row['dtype']} +" + " +".join(shown), PAGE, re.MULTILINE)
    for row in RESULT["rows"][1:]:
        assert abs(row["difference"]) <= RESULT["noise"]


def test_the_picture_is_there_and_small() -> None:
    data = (DOCS / "scenarios" / "precision.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) < 200_000
