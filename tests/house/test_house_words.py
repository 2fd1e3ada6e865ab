"""The project stands alone: no machine's paths, no registry's hosts, nothing left for later."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tools.source import ROOT, functions, parse, project_files, python_files

# Written so that this file does not contain what it looks for.
FORBIDDEN = {
    "absolute machine path": re.compile(
        r"(?<![\w.:/~-])/(?:[h]ome|[r]oot|[t]mp|[w]ork|[m]nt|[o]pt|[U]sers|[v]ar/tmp)(?:/\w|\b(?=[\s\"'`]|$))"
    ),
    "drive letter": re.compile(r"\b[C-D]:\\\w"),
    "path out of the checkout": re.compile(r"[.][.]/shared"),
    "package registry": re.compile(
        r"[p]ypi[.]|[p]ythonhosted|[p]ytorch[.]org/whl|[c]onda[.]anaconda|[r]egistry[.]npmjs"
    ),
    "left for later": re.compile(r"\b(?:[T]ODO|[F]IXME|[X]XX)\b"),
}
LICENCE = Path("LICENSE")
BARE_SKIP = re.compile(
    r"pytest\.(?:skip|xfail)\(\s*\)|mark\.(?:skip|xfail)(?:\(\s*\))?\s*(?:$|,|\])", re.MULTILINE
)


def texts() -> dict[Path, str]:
    """Every text file of the project but the licence, whose words are not ours."""
    found = {}
    for path in project_files():
        data = (ROOT / path).read_bytes()
        if path != LICENCE and b"\0" not in data:
            found[path] = data.decode()
    return found


def offences(text: str) -> list[str]:
    """Words in a text that no file of ours may hold."""
    return [f"{kind}: {hit[0]}" for kind, rule in FORBIDDEN.items() for hit in rule.finditer(text)]


def test_no_file_speaks_of_a_machine_or_a_registry() -> None:
    found = {str(path): hits for path, text in texts().items() if (hits := offences(text))}
    assert not found, found


@pytest.mark.parametrize(
    "text",
    [
        "cd " + "/ho" + "me/me/twinstep",
        "see '" + "/t" + "mp/x.json'",
        "data = Path('" + "/wo" + "rk/main')",
        "cd " + "/t" + "mp",
        "https://" + "py" + "pi.org/simple",
        "--index-url https://download." + "pytorch" + ".org/whl/cpu",
        "../" + "shared/design",
        "# TO" + "DO: later",
    ],
)
def test_each_forbidden_word_is_found(text: str) -> None:
    assert offences(text)


@pytest.mark.parametrize(
    "text",
    [
        "#!/bin/sh and /dev/null",
        "PYTHON=/path/to/python3",
        "a/wo" + "rk/b and reference/home.py",
        "the root / work ratio",
        "https://example.org/home/page",
    ],
)
def test_ordinary_words_pass(text: str) -> None:
    assert offences(text) == []


def test_every_skip_gives_a_reason() -> None:
    found = [str(path) for path in python_files() if BARE_SKIP.search((ROOT / path).read_text())]
    assert not found


def test_a_skip_without_a_reason_is_found() -> None:
    assert BARE_SKIP.search("    pytest.skip" + "()\n")
    assert BARE_SKIP.search("@pytest.mark.xfail" + "\ndef test(): ...")
    assert not BARE_SKIP.search('pytest.skip("needs CUDA")')


def too_long(text: str) -> bool:
    """More than 400 lines, and not a table of data, which has no functions."""
    return text.count("\n") > 400 and bool(functions(ast.parse(text)))


def test_no_file_is_longer_than_400_lines() -> None:
    assert not [str(path) for path in python_files() if too_long((ROOT / path).read_text())]


def test_a_long_file_is_found_and_a_long_table_is_not() -> None:
    assert too_long("x = 1\n" * 400 + "def f():\n    pass\n")
    assert not too_long("x = 1\n" * 500)
    assert not too_long("def f():\n    pass\n")


def placeholders(tree: ast.Module) -> list[str]:
    """Functions that only say that they are not written yet."""
    return [
        function.name
        for function in functions(tree)
        for node in function.body
        if isinstance(node, ast.Raise)
        and node.exc is not None
        and ast.unparse(node.exc).startswith("NotImplementedError")
    ]


def test_no_function_is_a_placeholder() -> None:
    found = {str(path): names for path in python_files() if (names := placeholders(parse(path)))}
    assert not found


def test_a_placeholder_is_found() -> None:
    assert placeholders(ast.parse("def f():\n    raise NotImplementedError('soon')")) == ["f"]
