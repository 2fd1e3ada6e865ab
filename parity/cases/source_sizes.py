"""Sizes that a kernel's own source suggests: one more than its blocks, chunks and waves.

No list of sizes meets every chunk that a kernel may have, but the numbers stand in its file: those
that are written there, those that names of the module stand for, and products of two of them.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations_with_replacement
from pathlib import Path

SMALLEST, LARGEST = 64, 1 << 18
OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Mult: operator.mul,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.LShift: operator.lshift,
    ast.Pow: operator.pow,
}
FACTORS = 12  # of the products, the largest; a file with more numbers is hardly a kernel


def source_sizes(file: Path, most: int) -> tuple[int, ...]:
    """Numbers of elements: one above a number of the file, or above a product of two.

    Args:
        file: Python source; what cannot be read or parsed suggests nothing.
        most: of the sizes, all together; the largest are left out.
    """
    try:
        tree = ast.parse(file.read_text())
    except (OSError, SyntaxError, ValueError):
        return ()
    numbers = set(_numbers(tree))
    factors = sorted(number for number in numbers if number > 1)[-FACTORS:]
    products = {a * b for a, b in combinations_with_replacement(factors, 2)}
    found, total = list[int](), 0
    for number in sorted(numbers | products):
        total += number + 1
        if SMALLEST <= number < LARGEST and total <= most:
            found.append(number + 1)
    return tuple(found)


def _numbers(tree: ast.Module) -> Iterator[int]:
    known: dict[str, int] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and (value := _value(node.value, known)) is not None:
            known |= {name.id: value for name in node.targets if isinstance(name, ast.Name)}
    yield from (v for node in ast.walk(tree) if (v := _value(node, known)) is not None)


def _value(node: ast.AST, known: Mapping[str, int]) -> int | None:
    """The whole number that an expression is, as far as the file tells; None past `LARGEST`."""
    found: int | None = None
    if isinstance(node, ast.Constant) and type(node.value) is int:
        found = node.value
    elif isinstance(node, ast.Name):
        found = known.get(node.id)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _value(node.left, known), _value(node.right, known)
        raises = isinstance(node.op, ast.LShift | ast.Pow)
        if left is not None and right is not None and not (raises and not 0 <= right < 32):
            found = int(OPERATORS[type(node.op)](left, right))
    return found if found is not None and 0 <= found <= LARGEST else None
