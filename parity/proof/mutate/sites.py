"""Every place in our Triton kernels and their launchers where a rule can plant a fault."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from twinstep.parity.operations.table import HOUSE
from twinstep.parity.proof.mutate.edits import Edit, edited, text_of
from twinstep.parity.proof.mutate.rules import IN_KERNELS, IN_LAUNCHERS, Rule
from twinstep.parity.registry.house_kernels import FILES

ROOT = Path(__file__).resolve().parents[3]
FOLDER = "fast/kernels"
PACKAGE = "twinstep.fast.kernels"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One fault planted in the source of a kernel.

    Attributes:
        name: file, function, rule, before and after; stays the same when lines move.
        file: relative to the checkout.
        line: where the change is.
        function: that holds it.
        jitted: whether that function is compiled; otherwise it launches.
        rule: of `parity.proof.mutate.rules`.
        before: the text that was there.
        after: the text in its place.
        operations: whose kernels reach the function.
        source: the whole file with the change.
    """

    name: str
    file: str
    line: int
    function: str
    jitted: bool
    rule: str
    before: str
    after: str
    operations: tuple[str, ...]
    source: str

    @property
    def module(self) -> str:
        """The module that the file is."""
        return f"{PACKAGE}.{Path(self.file).stem}"


@cache
def mutants() -> dict[str, Mutant]:
    """All mutants by name, in the order of files and lines."""
    reached = operations_by_function()
    found: dict[str, Mutant] = {}
    for path in sorted((ROOT / FOLDER).glob("*.py")):
        for mutant in _of_file(f"{FOLDER}/{path.name}", path.read_text(), reached):
            found[mutant.name] = mutant
    return found


def _of_file(
    file: str, source: str, reached: dict[tuple[str, str], tuple[str, ...]]
) -> Iterator[Mutant]:
    seen: Counter[str] = Counter()
    known: set[str] = set()
    for function in functions(source):
        operations = reached.get((Path(file).stem, function.name), ())
        if not operations:
            continue
        for edit in edits_of(function):
            before = text_of(edit.node)
            name = f"{file} {function.name}, {edit.rule}: {before} -> {edit.after}"
            text = edited(source, edit)
            if text in known:
                continue
            known.add(text)
            seen[name] += 1
            yield Mutant(
                name=name if seen[name] == 1 else f"{name} ({seen[name]})",
                file=file,
                line=edit.node.lineno,
                function=function.name,
                jitted=is_jitted(function),
                rule=edit.rule,
                before=before,
                after=edit.after,
                operations=operations,
                source=text,
            )


def functions(source: str) -> list[ast.FunctionDef]:
    """The functions at the top of a file."""
    return [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]


def is_jitted(function: ast.FunctionDef) -> bool:
    """Whether Triton compiles it."""
    return any("triton.jit" in text_of(row) for row in function.decorator_list)


def edits_of(function: ast.FunctionDef) -> Iterator[Edit]:
    """Every edit of a function's body, its docstring left alone."""
    rules: tuple[Rule, ...] = IN_KERNELS if is_jitted(function) else IN_LAUNCHERS
    body = function.body[1:] if ast.get_docstring(function) else function.body
    # The rule about stores looks at whole bodies, so the function itself is among the nodes.
    shell = ast.Module(body=body, type_ignores=[])
    # How many warps run a program changes its speed alone.
    speed = {
        row.value for row in ast.walk(shell) if isinstance(row, ast.keyword) if row.arg == "warps"
    }
    for node in ast.walk(shell):
        for rule in rules if node not in speed else ():
            yield from rule(node)


def operations_by_function() -> dict[tuple[str, str], tuple[str, ...]]:
    """Which operations' kernels reach a function, by (file stem, function)."""
    calls = _references()
    reached: dict[tuple[str, str], list[str]] = {}
    for operation in HOUSE:
        if operation.name not in FILES:
            continue
        waiting, seen = [(FILES[operation.name], f"{operation.name}_")], set()
        while waiting:
            place = waiting.pop()
            if place in seen:
                continue
            seen.add(place)
            waiting += calls.get(place, ())
        for place in seen:
            reached.setdefault(place, []).append(operation.name)
    return {place: tuple(names) for place, names in reached.items()}


def reaching(mutant: Mutant) -> set[tuple[str, str]]:
    """The functions through which a mutant's function can be reached, as (module, function)."""
    calls = _references()
    found = {(Path(mutant.file).stem, mutant.function)}
    while True:
        callers = {place for place, named in calls.items() if found & set(named)}
        if callers <= found:
            return {(f"{PACKAGE}.{stem}", name) for stem, name in found}
        found |= callers


@cache
def _references() -> dict[tuple[str, str], list[tuple[str, str]]]:
    """Which functions of the kernels a function names."""
    found = {}
    for path in sorted((ROOT / FOLDER).glob("*.py")):
        source = path.read_text()
        own = {function.name: (path.stem, function.name) for function in functions(source)}
        for node in ast.parse(source).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE + "."):
                stem = (node.module or "").rpartition(".")[2]
                own |= {alias.asname or alias.name: (stem, alias.name) for alias in node.names}
        for function in functions(source):
            names = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
            found[path.stem, function.name] = [own[name] for name in sorted(names & own.keys())]
    return found
