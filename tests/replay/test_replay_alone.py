"""Replay is a product of its own: it loads nothing of the house, and its README runs."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import twinstep.replay
from twinstep.replay.cuda import nvrtc

REPLAY = Path(twinstep.replay.__file__).parent
HOUSE = next(p for p in REPLAY.resolve().parents if (p / "pyproject.toml").exists())
PACKAGE = twinstep.replay.__name__
ALLOWED = {"numpy", "torch", "triton", "typer", "rich", "pytest", *sys.stdlib_module_names}
LOADED = f"""
import sys, {PACKAGE}, {PACKAGE}.pytest_plugin, {PACKAGE}.__main__, {PACKAGE}.shadow64.lift
print(*(m.__file__ for m in list(sys.modules.values()) if getattr(m, "__file__", None)), sep="\\n")
"""


def run(code: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_replay_loads_nothing_else_of_the_house() -> None:
    files = [Path(line).resolve() for line in run(LOADED, HOUSE).splitlines()]
    mine = [path for path in files if path.is_relative_to(HOUSE) and path.exists()]
    mine = [path for path in mine if ".venv" not in path.parts]
    parents = {REPLAY.parent.resolve() / "__init__.py"}
    strangers = {path for path in mine if not path.is_relative_to(REPLAY.resolve())} - parents
    assert strangers == set()
    assert len(mine) > 40


@pytest.mark.parametrize("path", sorted(REPLAY.rglob("*.py")), ids=lambda p: p.name)
def test_a_file_imports_replay_and_what_it_is_built_on(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            assert name.split(".")[0] in ALLOWED or f"{name}.".startswith(f"{PACKAGE}."), name


def test_the_programs_of_the_readme_run(tmp_path: Path) -> None:
    readme = (REPLAY / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", readme, re.S)
    assert len(blocks) == 4
    runnable = [b for b in blocks if "cuda_kernel" not in b or not nvrtc.missing()]
    file = tmp_path / "readme.py"
    file.write_text("\n".join(runnable))
    said = run(f"import runpy; runpy.run_path({str(file)!r})", HOUSE)
    assert "of x/out (12000000000 bytes), is outside it; kernel double" in said
    assert "readme.py:11" in said


def test_neither_modules_nor_folders_import_in_circles() -> None:
    modules: dict[str, set[str]] = {}
    folders: dict[str, set[str]] = {}
    for path in REPLAY.rglob("*.py"):
        own = ".".join(path.relative_to(REPLAY).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{PACKAGE}."):
                base = (node.module or "").removeprefix(PACKAGE).lstrip(".")
                for alias in node.names:
                    name = f"{base}.{alias.name}".replace(".", "/")
                    found = name.replace("/", ".") if (REPLAY / f"{name}.py").exists() else base
                    modules.setdefault(own, set()).add(found)
                    folders.setdefault(own.split(".")[0], set()).add(found.split(".")[0])
    for name, reached in folders.items():
        reached.discard(name)
    for graph in (modules, folders):
        assert set(graphlib.TopologicalSorter(graph).static_order()) >= set(graph)
    assert {"isa", "machine", "translate", "launch"} <= set(folders)
