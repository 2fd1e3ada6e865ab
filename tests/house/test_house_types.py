"""Types everywhere: the exemption for jitted bodies reaches jitted bodies and nothing else."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from tools.source import ROOT, functions, is_jitted, parse, python_files

MODULES = [
    module.removeprefix("twinstep.").removesuffix(".*").split(".")
    for row in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    if row.get("disallow_untyped_defs") is False
    for module in row["module"]
]
# The modules for which pyproject.toml relaxes mypy.
RELAXED = [
    path
    for path in python_files()
    if any(path.parts[: len(module)] == tuple(module) for module in MODULES)
]
ANY = re.compile(r"\bAny\b")
PACKAGES = (
    *("benchmarks", "contract", "fast", "golden", "parity", "reference", "replay", "scenarios"),
    "tools",
)


def unannotated(tree: ast.Module) -> list[str]:
    """Functions outside @triton.jit that lack the type of an argument or of the result."""
    return [
        f"{function.name}:{function.lineno}"
        for function in functions(tree)
        if not is_jitted(function) and not _annotated(function)
    ]


def public_any(tree: ast.Module) -> list[str]:
    """Public functions with `Any` in their signature."""
    return [
        f"{function.name}:{function.lineno}"
        for function in functions(tree)
        if not function.name.startswith("_")
        and not is_jitted(function)
        and any(ANY.search(ast.unparse(note)) for note in _annotations(function))
    ]


def test_every_function_that_is_not_jitted_is_annotated() -> None:
    found = {str(path): names for path in RELAXED if (names := unannotated(parse(path)))}
    assert not found


def test_no_public_signature_says_any() -> None:
    files = python_files(*PACKAGES)
    found = {str(path): names for path in files if (names := public_any(parse(path)))}
    assert not found


def test_jitted_files_keep_their_annotations_as_objects() -> None:
    """Postponed annotations make tl.constexpr a string, which Triton cannot read."""
    found = [
        str(path)
        for path in python_files(*PACKAGES)
        if any(map(is_jitted, functions(parse(path))))
        and "from __future__ import annotations" in (ROOT / path).read_text()
    ]
    assert not found


def test_a_launcher_without_types_is_found() -> None:
    code = "@triton.jit\ndef _k(p, n: tl.constexpr):\n    pass\n\n\ndef k_(p, n: int) -> None: ..."
    assert unannotated(ast.parse(code)) == ["k_:6"]
    assert unannotated(ast.parse("def f(x: int): ...")) == ["f:1"]
    assert unannotated(ast.parse("class A:\n    def f(self, *, x: int) -> None: ...")) == []


def test_any_in_a_signature_is_found() -> None:
    assert public_any(ast.parse("def f(x: Any) -> None: ...")) == ["f:1"]
    assert public_any(ast.parse("def f() -> dict[str, typing.Any]: ...")) == ["f:1"]
    assert public_any(ast.parse("def f(x: Anything) -> None: ...")) == []
    assert public_any(ast.parse("def _f(x: Any) -> None: ...")) == []


def test_there_are_files_to_read() -> None:
    folders = {path.parent for path in RELAXED}
    assert {Path("fast/kernels"), Path("parity/proof/corpus"), Path("tests/house")} <= folders
    assert Path("replay/corpus/kernels") in folders


def _arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    names = function.args
    listed = [*names.posonlyargs, *names.args, *names.kwonlyargs, names.vararg, names.kwarg]
    return [argument for argument in listed if argument is not None]


def _annotations(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
    notes = [argument.annotation for argument in _arguments(function)] + [function.returns]
    return [note for note in notes if note is not None]


def _annotated(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    needed = [arg for arg in _arguments(function) if arg.arg not in ("self", "cls")]
    return function.returns is not None and all(argument.annotation for argument in needed)
