"""`contract` does no arithmetic on tensors: neither by operators nor by torch's functions."""

from __future__ import annotations

import ast

import pytest
from torch import Tensor

from tools.source import ROOT, python_files

FILES = python_files("contract")
# Functions and methods of torch that make, move, cut or cast tensors and compute nothing.
MOVES = {
    *("cat", "clone", "contiguous", "copy_", "detach", "detach_", "empty", "fill_", "flatten"),
    *("full", "narrow", "new_zeros", "reshape", "requires_grad_", "split", "tensor", "to", "view"),
    *("zero_", "zeros", "zeros_like"),
}
# What a tensor is, and elements read by the host.
LOOKS = {"dim", "is_contiguous", "is_floating_point", "item", "numel", "stride", "tolist"}
LOOKS |= {"_fix_weakref", "is_inference"}
# Methods of Python's own types that tensors have, too.
PLAIN = {"copy", "count", "index", "values"}
TENSOR_METHODS = {name for name in dir(Tensor) if not name.startswith("__")}
# Of torch, nothing else is called.
TORCH = {f"torch.{name}" for name in MOVES} | {
    *(
        "torch.device",
        "torch._disable_dynamo",
        "torch.load",
        "torch.save",
        "torch.serialization.safe_globals",
        "torch.cuda.Event",
        # The mode of autograd, within which a closure is called.
        "torch.enable_grad",
        "torch.no_grad",
    ),
}
OPERATORS = ast.BinOp | ast.AugAssign | ast.UnaryOp


def annotated(tree: ast.AST) -> set[str]:
    """Names that an annotation gives a tensor, or several; and what iterates over those."""
    names = set()
    for node in ast.walk(tree):
        note = getattr(node, "annotation", None)
        if note is None or "Tensor" not in ast.unparse(note):
            continue
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target).rsplit(".", 1)[-1])
    return names


def violations(source: str) -> list[str]:
    """Arithmetic in a file of `contract`, as `line: call or operator`."""
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = [(call.lineno, name) for call in calls for name in _called(call)]
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            tensors = tainted(function)
            found += [
                (node.lineno, ast.unparse(node))
                for node in ast.walk(function)
                if isinstance(node, OPERATORS) and _computes(node, tensors)
            ]
    return [f"{line}: {what}" for line, what in sorted(set(found))]


def _called(node: ast.Call) -> list[str]:
    """A call of torch that may compute."""
    if not isinstance(node.func, ast.Attribute):
        return []
    name, whole = node.func.attr, ast.unparse(node.func)
    if whole.startswith("torch."):
        return [whole] if whole not in TORCH else []
    scalar = isinstance(node.func.value, ast.Constant | ast.JoinedStr) or whole.startswith("math.")
    return [name] if name in TENSOR_METHODS - MOVES - LOOKS - PLAIN and not scalar else []


def tainted(function: ast.FunctionDef) -> set[str]:
    """Names in a function that may be tensors: by annotation, or made from such by a move."""
    names = annotated(function)
    for _ in range(3):
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and _is_tensor(node.value, names):
                names |= {
                    n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)
                }
            elif isinstance(node, ast.For | ast.comprehension) and _is_tensor(node.iter, names):
                names |= {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)}
    return names


def _is_tensor(node: ast.AST, names: set[str]) -> bool:
    """Whether the value of an expression may be a tensor, or hold some."""
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Attribute):
        return node.attr in ("grad", "data", "master", "flat", "accumulator")
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            inner = ast.unparse(node.func.value)
            made = inner == "torch" and node.func.attr in MOVES
            return made or (node.func.attr in MOVES and _is_tensor(node.func.value, names))
        iterates = ast.unparse(node.func) in ("enumerate", "zip", "list", "reversed", "iter")
        return iterates and any(_is_tensor(argument, names) for argument in node.args)
    if isinstance(node, ast.Subscript | ast.Starred):
        return _is_tensor(node.value, names)
    if isinstance(node, ast.BinOp):
        return _is_tensor(node.left, names) or _is_tensor(node.right, names)
    return False


def _computes(node: ast.BinOp | ast.AugAssign | ast.UnaryOp, tensors: set[str]) -> bool:
    if isinstance(node, ast.UnaryOp):
        return not isinstance(node.op, ast.Not) and _is_tensor(node.operand, tensors)
    if isinstance(node, ast.AugAssign):
        return _is_tensor(node.target, tensors) or _is_tensor(node.value, tensors)
    return _is_tensor(node.left, tensors) or _is_tensor(node.right, tensors)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_the_contract_does_no_arithmetic_on_tensors(path: object) -> None:
    assert violations((ROOT / str(path)).read_text()) == []


PLANTED = [
    "def f(t: Tensor) -> Tensor:\n    return t + 1",
    "def f(t: Tensor) -> Tensor:\n    return 2.0 * t",
    "def f(t: Tensor) -> Tensor:\n    return -t",
    "def f(t: Tensor) -> None:\n    t *= 0.5",
    "def f(param: Tensor) -> Tensor:\n    return param.grad / 2",
    "def f(ts: Sequence[Tensor]) -> list[Tensor]:\n    return [t @ t for t in ts]",
    "def f(ts: Sequence[Tensor]) -> None:\n    for i, t in enumerate(ts):\n        print(t - i)",
    "def f(t: Tensor) -> Tensor:\n    flat = t.detach().reshape(-1)\n    return flat ** 2",
    "def f() -> Tensor:\n    made = torch.zeros(3)\n    return made + made",
    "def f(t: Tensor) -> Tensor:\n    return t.add(1)",
    "def f(t: Tensor) -> None:\n    t.mul_(0.5)",
    "def f(t: Tensor) -> float:\n    return t.sum().item()",
    "def f(t):\n    return t.norm()",
    "def f(t):\n    return torch.where(t, t, t)",
    "def f(t):\n    return torch.isnan(t)",
    "def f(ts):\n    return torch._foreach_add(ts, 1)",
    "def f(t):\n    return torch.linalg.vector_norm(t)",
    "def f(t):\n    return torch.nn.functional.relu(t)",
]


@pytest.mark.parametrize("code", PLANTED)
def test_planted_arithmetic_is_found(code: str) -> None:
    assert violations(code) != []


@pytest.mark.parametrize(
    "code",
    [
        "def f(t: Tensor) -> Tensor:\n    return torch.cat([t, t.new_zeros(t.numel() - 1)])",
        "def f(t: Tensor, n: int) -> int:\n    return t.numel() * n + t.shape[0]",
        "def f(a: Tensor, b: Tensor) -> None:\n    a.copy_(b)",
        "def f(names: list[str]) -> str:\n    return ', '.join(names) + '.'",
    ],
)
def test_moves_and_whole_numbers_pass(code: str) -> None:
    assert violations(code) == []
