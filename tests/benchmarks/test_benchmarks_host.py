"""Host time: the command line takes what it knows, before anything is measured."""

from __future__ import annotations

import pytest

from twinstep.benchmarks import host


@pytest.mark.parametrize(("word", "code"), [("--help", 0), ("--wirte", 2), ("write", 2)])
def test_a_word_that_is_not_write_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, word: str, code: int
) -> None:
    monkeypatch.setattr(host, "measure", lambda count: pytest.fail("measured"))
    with pytest.raises(SystemExit) as ended:
        host.main([word])
    assert ended.value.code == code
