"""Finds arithmetic that both sides hold: copied code shares its mistakes as imports do."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from tools.source import functions

# Shorter bodies can only be written one way.
LINES = 8
# What a tensor is, and methods of Python's own types that tensors have, too.
LOOKS = {"copy", "count", "dim", "dtype", "index", "is_contiguous", "numel", "stride", "values"}
VALUES = {name for name in dir(Tensor) if name[:2] != "__"} - LOOKS


@dataclass(frozen=True)
class Body:
    """A function's body with local names, docstring and annotations taken out of account."""

    where: str
    normal: str

    @property
    def lines(self) -> int:
        """Length in the one formatting that `ast.unparse` knows."""
        return self.normal.count("\n") + 1


class _Normalise(ast.NodeTransformer):
    """Number the local names in order of appearance and drop annotations."""

    def __init__(self, local_names: set[str]) -> None:
        self.local_names = local_names
        self.numbers: dict[str, str] = {}

    def _rename(self, name: str) -> str:
        if name not in self.local_names:
            return name
        return self.numbers.setdefault(name, f"v{len(self.numbers)}")

    def visit_Name(self, node: ast.Name) -> ast.AST:  # noqa: D102
        return ast.Name(self._rename(node.id), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.AST:  # noqa: D102
        return ast.arg(self._rename(node.arg))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:  # noqa: D102
        if node.value is None:
            return ast.Pass()
        target, value = self.visit(node.target), self.visit(node.value)
        return ast.Assign([target], value, lineno=node.lineno)


def bodies(sources: Mapping[str, str]) -> list[Body]:
    """The bodies of LINES lines or more that touch values, in files given as path → text."""
    found = []
    for path, text in sources.items():
        for function in functions(ast.parse(text, path)):
            body = Body(f"{path}:{function.lineno} {function.name}", _normal(function))
            if body.lines >= LINES and touches_values(function):
                found.append(body)
    return found


def touches_values(function: ast.AST) -> bool:
    """Report an operator, or a call by which the elements of a tensor may be read or written.

    What is left, checks of metadata and the like, both sides could as well share.
    """
    for node in ast.walk(function):
        if isinstance(node, ast.BinOp | ast.AugAssign):
            return True
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute):
            of_torch = ast.unparse(called).startswith("torch.")
            if of_torch or called.attr in VALUES:
                return True
    return False


def copies(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Pairs of equal bodies across two sides, one sentence for each."""
    by_text = {body.normal: body.where for body in bodies(one)}
    return [
        f"{by_text[body.normal]} and {body.where} hold the same {body.lines} lines"
        for body in bodies(other)
        if body.normal in by_text
    ]


def _normal(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    statements = function.body
    if ast.get_docstring(function, clean=False) is not None:
        statements = statements[1:]
    assigned = {
        node.id
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    arguments = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    normalise = _Normalise(assigned | arguments)
    copied = ast.parse("\n".join(ast.unparse(statement) for statement in statements))
    return ast.unparse(ast.fix_missing_locations(normalise.visit(copied)))
