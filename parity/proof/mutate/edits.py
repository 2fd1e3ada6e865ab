"""Replacing one piece of a Python file so that every other line keeps its number."""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """One replacement.

    Attributes:
        rule: what kind of fault it plants.
        node: the piece that is replaced.
        after: the text in its place.
    """

    rule: str
    node: ast.expr | ast.stmt
    after: str


def edited(source: str, edit: Edit) -> str:
    """The file's text with the edit, as many lines long as before."""
    start, end = span(source, edit.node)
    data = source.encode()
    lost = data[start:end].count(b"\n") - edit.after.count("\n")
    after = edit.after
    if isinstance(edit.node, ast.expr):
        after = f"({after}" + "\n" * lost + ")"
    else:
        after += "\n" * lost
    return (data[:start] + after.encode() + data[end:]).decode()


def span(source: str, node: ast.expr | ast.stmt) -> tuple[int, int]:
    """First byte of a node, and first byte past it."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    if node.end_lineno is None or node.end_col_offset is None:
        raise ValueError(f"line {node.lineno} has a node without an end [edits]")
    return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + (
        node.end_col_offset
    )


def text_of(node: ast.AST) -> str:
    """A node as one line of text."""
    return " ".join(ast.unparse(node).split())
