"""What a kernel is made of, read from the source of the jitted functions that it can reach."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, ModuleType

from twinstep.parity.registry.kernels import Kernel

OWN = ("triton", "torch", "numpy", "twinstep.replay")


@dataclass
class Facts:
    """What decides which divergences a kernel meets.

    Attributes:
        dtypes: fp16, bf16, fp32 as far as the kernel claims them.
        calls: Names of called functions and methods.
        computes: Whether it has any float arithmetic.
        contracts: Whether it adds to a product.
        divides: Whether it divides with `/`.
        casts_to_int: Whether it converts to an integer type.
        masked_without_other: Whether it loads under a mask and gives no `other`.
        scalar_arithmetic: Whether an argument meets a float constant outside any tensor.
    """

    dtypes: set[str] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)
    computes: bool = False
    contracts: bool = False
    divides: bool = False
    casts_to_int: bool = False
    masked_without_other: bool = False
    scalar_arithmetic: bool = False


def facts_of(kernel: Kernel) -> Facts:
    """The facts of a registered kernel."""
    found = Facts()
    for name in kernel.dtypes:
        found.dtypes |= {kind for kind in ("fp16", "bf16", "fp32") if kind in name}
        found.dtypes |= {"fp16", "bf16", "fp32"} if name == "mixed" else set()
    for function in jitted(kernel.function):
        read(function, found)
    return found


def jitted(function: Callable[..., object], depth: int = 5) -> Iterator[FunctionType]:
    """The Python functions under @triton.jit that a function reaches through its globals."""
    waiting: list[tuple[object, int]] = [(function, depth)]
    seen: set[int] = set()
    while waiting:
        value, left = waiting.pop()
        if id(value) in seen or left < 0:
            continue
        seen.add(id(value))
        inner = getattr(value, "fn", None)
        if isinstance(inner, FunctionType) and type(value).__module__.startswith("triton"):
            yield inner
            value = inner
        waiting += [(each, left - 1) for each in _reached(value)]


def _reached(value: object) -> Iterator[object]:
    """What a function names: globals that it uses, functions of modules that it uses, cells."""
    if not isinstance(value, FunctionType):
        return
    for cell in value.__closure__ or ():
        with contextlib.suppress(ValueError):
            yield cell.cell_contents
    names = set(value.__code__.co_names)
    for name in names & value.__globals__.keys():
        found = value.__globals__[name]
        if isinstance(found, ModuleType):
            if not found.__name__.startswith(OWN):
                yield from (vars(found)[n] for n in names & vars(found).keys())
        elif not str(getattr(found, "__module__", "")).startswith(OWN) or hasattr(found, "fn"):
            yield found


def read(function: FunctionType, facts: Facts) -> None:
    """Add what one jitted function holds."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return
    parameters = set(inspect.signature(function).parameters)
    places = _places(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            _call(node, facts)
        elif isinstance(node, ast.BinOp) and not _is_place(node, places):
            _operation(node, parameters, facts)


def _places(tree: ast.AST) -> set[str]:
    """Names that hold positions: made from program_id and arange, before anything is loaded."""
    found: set[str] = set()
    for _ in range(3):  # names may be used before the walk has seen how they were made
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and _is_place(node.value, found):
                found |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    return found


def _is_place(node: ast.AST, places: set[str]) -> bool:
    """Whether an expression computes a position."""
    inside = list(ast.walk(node))
    calls = {getattr(n.func, "attr", "") for n in inside if isinstance(n, ast.Call)}
    names = {n.id for n in inside if isinstance(n, ast.Name)}
    made = bool(calls & {"program_id", "num_programs", "arange"} or names & places)
    return made and "load" not in calls


def _call(node: ast.Call, facts: Facts) -> None:
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    facts.calls.add(name)
    given = {keyword.arg for keyword in node.keywords}
    if name == "load":
        masked = "mask" in given or len(node.args) > 1
        facts.masked_without_other |= masked and not ("other" in given or len(node.args) > 2)
    if name == "to":
        kinds = [getattr(arg, "attr", "") for arg in node.args]
        facts.casts_to_int |= any(kind.startswith(("int", "uint")) for kind in kinds)


def _operation(node: ast.BinOp, parameters: set[str], facts: Facts) -> None:
    facts.computes = True
    products = [isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult) for n in _sides(node)]
    facts.contracts |= isinstance(node.op, ast.Add | ast.Sub) and any(products)
    facts.divides |= isinstance(node.op, ast.Div)
    floats = [isinstance(n, ast.Constant) and isinstance(n.value, float) for n in _sides(node)]
    names = [isinstance(n, ast.Name) and n.id in parameters for n in _sides(node)]
    facts.scalar_arithmetic |= any(floats) and any(names)


def _sides(node: ast.BinOp) -> tuple[ast.expr, ast.expr]:
    return node.left, node.right
