"""Rules that change a kernel: one small function for each kind of fault.

A rule looks at one node and returns the texts that may stand in its place. Rules for kernels apply
inside `@triton.jit` functions, rules for launchers outside of them, the common ones in both.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator

from twinstep.parity.proof.mutate.edits import Edit, text_of

Rule = Callable[[ast.AST], Iterator[Edit]]

OPERATORS: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(),
    ast.Sub: ast.Add(),
    ast.Mult: ast.Add(),
    ast.Div: ast.Mult(),
    ast.FloorDiv: ast.Mult(),
    ast.BitAnd: ast.BitOr(),
    ast.BitOr: ast.BitAnd(),
    ast.LShift: ast.RShift(),
    ast.RShift: ast.LShift(),
}
COMPARISONS: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
}
PAIRS = {"maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max"}
NARROWER = {"float64": "float32", "float32": "bfloat16", "int64": "int32"}
STORES = ("store", "atomic_add", "atomic_xchg")
MEMORY = ("load", *STORES)


def called(node: ast.AST, *names: str) -> bool:
    """True if a node calls one of these functions of `triton.language`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "tl"
        and node.func.attr in names
    )


def arithmetic(node: ast.AST) -> Iterator[Edit]:
    """Another operator: plus for minus, times for divided by, or for and, minimum for maximum."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        new = copy.copy(node)
        new.op = OPERATORS[type(node.op)]
        yield Edit("operator", node, text_of(new))
    if isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
        changed = copy.copy(node)
        changed.op = OPERATORS[type(node.op)]
        yield Edit("operator", node, text_of(changed))
    if isinstance(node, ast.Call) and called(node, *PAIRS):
        function = node.func
        assert isinstance(function, ast.Attribute)
        other = copy.deepcopy(node)
        other.func = ast.Attribute(function.value, PAIRS[function.attr], ast.Load())
        yield Edit("operator", node, text_of(other))


def constant(node: ast.AST) -> Iterator[Edit]:
    """A number one too large."""
    number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
    if number and isinstance(node, ast.Constant):
        yield Edit("constant", node, f"{node.value!r} + 1")


def comparison(node: ast.AST) -> Iterator[Edit]:
    """The boundary moved in or out, equal for unequal; and a bound one too small."""
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        return
    if type(node.ops[0]) in COMPARISONS:
        new = copy.copy(node)
        new.ops = [COMPARISONS[type(node.ops[0])]]
        yield Edit("comparison", node, text_of(new))
    if isinstance(node.ops[0], ast.Lt):
        yield Edit("bound - 1", node, f"{text_of(node)} - 1")


def condition(node: ast.AST) -> Iterator[Edit]:
    """The branches of an `if` or of a selection change places."""
    if isinstance(node, ast.If | ast.IfExp):
        yield Edit("condition", node.test, f"not ({text_of(node.test)})")
    if isinstance(node, ast.Call) and called(node, "where") and len(node.args) == 3:
        new = copy.copy(node)
        new.args = [node.args[0], node.args[2], node.args[1]]
        yield Edit("condition", node, text_of(new))


def mask(node: ast.AST) -> Iterator[Edit]:
    """A load or a store without its mask; a load that fills in another value."""
    if isinstance(node, ast.Call) and called(node, *MEMORY):
        for keyword in node.keywords:
            if keyword.arg == "mask" and text_of(keyword.value) != "None":
                yield Edit("mask dropped", keyword.value, "None")
            if keyword.arg == "other":
                yield Edit("other", keyword.value, f"{text_of(keyword.value)} + 1")


def address(node: ast.AST) -> Iterator[Edit]:
    """Every access of one load or store one element further on."""
    if isinstance(node, ast.Call) and called(node, *MEMORY):
        yield Edit("index + 1", node.args[0], f"{text_of(node.args[0])} + 1")


def store_dropped(node: ast.AST) -> Iterator[Edit]:
    """A store that is never made."""
    if isinstance(node, ast.Expr) and called(node.value, *STORES):
        yield Edit("store dropped", node, "pass")


def store_early(node: ast.AST) -> Iterator[Edit]:
    """A value stored before it is computed: the last assignment to it comes after the store."""
    for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
        if not isinstance(body, list):
            continue
        for place, statement in enumerate(body):
            if isinstance(statement, ast.Expr) and called(statement.value, "store"):
                yield from _stale(body[:place], statement)


def _stale(before: list[ast.stmt], store: ast.Expr) -> Iterator[Edit]:
    """The store with the value that a name had before it was assigned again."""
    assert isinstance(store.value, ast.Call)
    names = {n.id for n in ast.walk(store.value.args[1]) if isinstance(n, ast.Name)}
    for statement in reversed(before):
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            continue
        name = statement.targets[0].id
        reads = {n.id for n in ast.walk(statement.value) if isinstance(n, ast.Name)}
        if name in names and name in reads:
            # One line for both, so that no line number moves.
            yield Edit(
                f"store of {name} early", statement, f"{text_of(store)}; {text_of(statement)}"
            )
            return


def narrower(node: ast.AST) -> Iterator[Edit]:
    """A type of half the width."""
    if isinstance(node, ast.Attribute) and text_of(node.value) == "tl" and node.attr in NARROWER:
        yield Edit("narrower type", node, f"tl.{NARROWER[node.attr]}")


def eps_inside(node: ast.AST) -> Iterator[Edit]:
    """A term added to a root moves under it."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)):
        return
    root = node.left
    if isinstance(root, ast.Call) and called(root, "sqrt_rn", "sqrt"):
        inside = f"{text_of(root.args[0])} + {text_of(node.right)}"
        yield Edit("under the root", node, f"{text_of(root.func)}({inside})")


def rounding(node: ast.AST) -> Iterator[Edit]:
    """Division and root as the compiler likes them, not correctly rounded."""
    if isinstance(node, ast.Call) and called(node, "div_rn"):
        one, two = node.args
        yield Edit("fast division", node, f"({text_of(one)}) / ({text_of(two)})")
    if isinstance(node, ast.Call) and called(node, "sqrt_rn"):
        yield Edit("fast root", node, f"tl.sqrt({text_of(node.args[0])})")


def launches(node: ast.AST) -> Iterator[Edit]:
    """One program more or less than needed; a compile-time switch the other way."""
    is_launch = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "launch"
    if not is_launch or not isinstance(node, ast.Call):
        return
    grid = node.args[1]
    yield Edit("grid + 1", grid, f"{text_of(grid)} + 1")
    yield Edit("grid - 1", grid, f"{text_of(grid)} - 1")
    for keyword in node.keywords:
        flag = isinstance(keyword.value, ast.Name | ast.Compare)
        if keyword.arg and keyword.arg.isupper() and flag:
            yield Edit("flag", keyword.value, f"not ({text_of(keyword.value)})")


COMMON: tuple[Rule, ...] = (arithmetic, constant, comparison, condition)
IN_KERNELS: tuple[Rule, ...] = (
    *COMMON,
    mask,
    address,
    store_dropped,
    store_early,
    narrower,
    eps_inside,
    rounding,
)
IN_LAUNCHERS: tuple[Rule, ...] = (*COMMON, launches)
