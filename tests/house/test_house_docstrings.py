"""Public docstrings open with the thing itself, not with a question."""

from __future__ import annotations

import ast

import pytest

from tools.docstrings import offences
from tools.source import parse, python_files


def test_public_docstrings_open_with_the_thing() -> None:
    found = [f"{path}:{line}" for path in python_files() for line in offences(parse(path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        '"""What this is."""',
        'def f():\n    """Whether it holds."""',
        'class A:\n    def f(self):\n        """Where, and why."""',
    ],
)
def test_a_question_is_found(code: str) -> None:
    assert list(offences(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        '"""Accepted interval."""\nx = """What?"""',
        'def _f():\n    """Whether it holds."""',
        'def f():\n    """Whatever is left."""',
    ],
)
def test_what_is_no_question_or_not_public_passes(code: str) -> None:
    assert not list(offences(ast.parse(code)))
