"""Divergences of Triton's interpreter from compiled code that a kernel meets, read off its source.

The list is frozen: docs/decisions/0010-triton-interpreter-measured-once.md has the measurement.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType

from twinstep.parity.registry.kernels import Kernel

FOREIGN = ("triton", "torch", "numpy", "twinstep.replay")
CAVEAT = (
    "interpret: a kept law says nothing about these, and a broken one may be the interpreter's own "
    "fault; judge on replay or cuda (docs/reference/engines.md)"
)
POSITIONS = {"program_id", "num_programs", "arange"}


@dataclass
class Facts:
    """Traits of a kernel that decide which divergences it meets.

    Attributes:
        dtypes: fp16, bf16, fp32 as far as the kernel claims them.
        calls: names of called functions and methods.
        computes: it has arithmetic on other things than positions.
        contracts: it adds to a product.
        casts_to_int: it converts to an integer type.
        scalar_arithmetic: an argument meets a float constant outside any tensor.
    """

    dtypes: set[str] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)
    computes: bool = False
    contracts: bool = False
    casts_to_int: bool = False
    scalar_arithmetic: bool = False


def _calls(*names: str) -> Callable[[Facts], bool]:
    return lambda facts: not facts.calls.isdisjoint(names)


# The interpreter rounds to bf16 by cutting: its verdicts on bf16 are worthless.
DIVERGENCES: dict[str, Callable[[Facts], bool]] = {
    "fp32 stored as bf16": lambda facts: "bf16" in facts.dtypes,
    "bf16 + bf16": lambda facts: "bf16" in facts.dtypes and facts.computes,
    "a * b + c, fusion allowed": lambda facts: facts.contracts,
    "tl.fma": _calls("fma"),
    "tl.sqrt": _calls("sqrt"),
    "tl.rsqrt": _calls("rsqrt"),
    "tl.exp2": _calls("exp", "exp2"),
    "fp32 to int32 out of range": lambda facts: facts.casts_to_int,
    "tl.maximum with NaN": _calls("maximum", "minimum"),
    "scalar argument: (1.0 - beta) * a": lambda facts: facts.scalar_arithmetic,
    "tl.atomic_add of bf16": lambda facts: "atomic_add" in facts.calls and "bf16" in facts.dtypes,
    "tl.inline_asm_elementwise": _calls("inline_asm_elementwise"),
    "store beyond the tensor": lambda facts: True,
    "race between programs": lambda facts: True,
}


def remarks(kernels: Sequence[Kernel]) -> list[str]:
    """Sentences beside verdicts that were reached in the interpreter; none without a kernel."""
    found = [
        f"interpret: {kernel.name} meets what Triton's interpreter is known to do otherwise "
        f"than compiled code: {'; '.join(divergences(kernel))}"
        for kernel in kernels
    ]
    return [*found, CAVEAT] if found else []


def divergences(kernel: Kernel) -> list[str]:
    """Names of the divergences that a registered kernel meets."""
    facts = Facts()
    for name in kernel.dtypes:
        kinds = ("fp16", "bf16", "fp32")
        facts.dtypes |= {kind for kind in kinds if kind in name or name == "mixed"}
    for function in jitted(kernel.function):
        read(function, facts)
    return [name for name, touches in DIVERGENCES.items() if touches(facts)]


def jitted(function: Callable[..., object], depth: int = 5) -> Iterator[FunctionType]:
    """Functions under @triton.jit that a function reaches through globals, modules and cells."""
    level: list[object] = [function]
    seen: set[int] = set()
    for _ in range(depth + 1):
        fresh = {id(value): value for value in level if id(value) not in seen}
        seen |= fresh.keys()
        level = []
        for value in fresh.values():
            inner = getattr(value, "fn", None)
            if isinstance(inner, FunctionType) and type(value).__module__.startswith("triton"):
                yield inner
                value = inner
            level += _named(value) if isinstance(value, FunctionType) else []


def _named(function: FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            yield cell.cell_contents
    names = set(function.__code__.co_names)
    for name in names & function.__globals__.keys():
        found = function.__globals__[name]
        if isinstance(found, ModuleType):
            if not found.__name__.startswith(FOREIGN):
                yield from (vars(found)[n] for n in names & vars(found).keys())
        elif not str(getattr(found, "__module__", "")).startswith(FOREIGN) or hasattr(found, "fn"):
            yield found


def read(function: FunctionType, facts: Facts) -> None:
    """Add what one jitted function holds to the facts."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return
    parameters = set(inspect.signature(function).parameters)
    positions = _positions(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            facts.calls.add(name)
            kinds = [getattr(arg, "attr", "") for arg in node.args] if name == "to" else []
            facts.casts_to_int |= any(kind.startswith(("int", "uint")) for kind in kinds)
        elif isinstance(node, ast.BinOp) and not _is_position(node, positions):
            sides = (node.left, node.right)
            products = [isinstance(x, ast.BinOp) and isinstance(x.op, ast.Mult) for x in sides]
            floats = [isinstance(x, ast.Constant) and isinstance(x.value, float) for x in sides]
            arguments = [isinstance(x, ast.Name) and x.id in parameters for x in sides]
            facts.computes = True
            facts.contracts |= isinstance(node.op, ast.Add | ast.Sub) and any(products)
            facts.scalar_arithmetic |= any(floats) and any(arguments)


def _positions(tree: ast.AST) -> set[str]:
    """Names made from program_id and arange before anything is loaded."""
    found: set[str] = set()
    for _ in range(3):  # a name may be used before the walk has seen how it was made
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and _is_position(node.value, found):
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def _is_position(node: ast.AST, positions: set[str]) -> bool:
    inside = list(ast.walk(node))
    calls = {getattr(n.func, "attr", "") for n in inside if isinstance(n, ast.Call)}
    names = {n.id for n in inside if isinstance(n, ast.Name)}
    return bool(calls & POSITIONS or names & positions) and "load" not in calls
