"""Readers of our own source: its files and the functions in them."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Not listed by git either; for a copy of the tree that came without git.
LEFT_OUT = frozenset({"build", "dist", "out"})


def project_files(root: Path = ROOT) -> list[Path]:
    """Every file of the project: tracked, or new and not ignored; relative to root, sorted."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others"]
    try:
        listed = subprocess.run(
            [*command, "--exclude-standard"], capture_output=True, text=True, check=True
        ).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        listed = [str(path.relative_to(root)) for path in root.rglob("*") if _ours(root, path)]
    return sorted(Path(name) for name in set(listed) if name and (root / name).is_file())


def python_files(*folders: str, root: Path = ROOT) -> list[Path]:
    """The project's Python files, those under the named top-level folders if any are named."""
    files = [path for path in project_files(root) if path.suffix == ".py"]
    return [path for path in files if not folders or path.parts[0] in folders]


def parse(path: Path, root: Path = ROOT) -> ast.Module:
    """Syntax tree of a file named relative to root."""
    return ast.parse((root / path).read_text(), str(path))


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method, nested ones too."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def is_jitted(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True if a decorator makes this function a Triton kernel body."""
    names = (ast.unparse(decorator).split("(")[0] for decorator in function.decorator_list)
    return any(name in ("triton.jit", "jit") for name in names)


def _ours(root: Path, path: Path) -> bool:
    parts = path.relative_to(root).parts
    hidden = any(part.startswith(".") and part != ".ci" for part in parts[:-1])
    return not (hidden or "__pycache__" in parts or parts[0] in LEFT_OUT or path.suffix == ".pyc")
