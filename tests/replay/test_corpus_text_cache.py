"""An interrupted run of the corpus maker goes on where it was, and makes nothing twice or wrong."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from twinstep.replay.corpus.make import check_compiler
from twinstep.replay.corpus.text_cache import Job, Row, rows


def jobs(names: str, made: list[str], breaks_at: str = "") -> list[Job]:
    """One job for each letter; a list that notes which were made."""

    def make(name: str) -> Row:
        if name == breaks_at:
            raise KeyboardInterrupt
        made.append(name)
        return {"text": name.upper()}

    return [(name, partial(make, name)) for name in names]


def test_what_was_made_before_an_interruption_is_kept(tmp_path: Path) -> None:
    made: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        rows(jobs("abcd", made, breaks_at="c"), tmp_path / "kept")
    found, count = rows(jobs("abcd", made), tmp_path / "kept")
    assert made == ["a", "b", "c", "d"]
    assert count == 2
    assert [row["text"] for row in found] == ["A", "B", "C", "D"]


def test_a_line_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    made: list[str] = []
    file = tmp_path / "kept"
    rows(jobs("ab", made), file)
    file.write_text(file.read_text()[:-9])
    for wanted in (1, 0):
        found, count = rows(jobs("ab", made), file)
        assert count == wanted
        assert [row["text"] for row in found] == ["A", "B"]
    assert made == ["a", "b", "b"]


def test_texts_of_another_compiler_are_refused() -> None:
    check_compiler("nvrtc-12.9", {"tools": {"nvrtc-12.9": {}}})
    with pytest.raises(RuntimeError, match=r"with nvrtc-13\.5, but should be with nvrtc-12\.9"):
        check_compiler("nvrtc-12.9", {"tools": {"nvrtc-13.5": {}}})
