"""Public docstrings that open with a question word; `python -m tools.docstrings` lists them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from tools.source import parse, python_files

QUESTIONS = ("How", "What", "Where", "Whether", "Which", "Who", "Whose", "Why")


def offences(tree: ast.Module) -> Iterator[str]:
    """Line, name and first line of every public docstring that does not open with the thing."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, documented) else None
        name = getattr(node, "name", "module")
        if text and not name.startswith("_") and text.split()[0].rstrip(",:") in QUESTIONS:
            yield f"{getattr(node, 'lineno', 1)} {name}: {text.splitlines()[0]}"


if __name__ == "__main__":
    for path in python_files(*sys.argv[1:]):
        for offence in offences(parse(path)):
            print(f"{path}:{offence}")
