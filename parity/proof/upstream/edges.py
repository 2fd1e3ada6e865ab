"""The edge table: every known sharp edge of upstream, and what this project decided about it.

An edge is a place where DeepSpeed's behaviour surprises. Its id is a prefix and a number: LS loss
scaling, OV overflow detection, NM norms and clipping, ME mixture of experts, FA FusedAdam, LB
FusedLamb, FP, UF, BF and Z the mixed-precision optimizers, TF fragments of flat buffers, CK
checkpoints, CA Adam on the CPU, EN the engine around them. Every id has a row, and every row has a
test, or names which component is not built yet. The rows are in `edges.toml`.

`python -m twinstep.parity.proof.upstream.edges` writes docs/reference/edges.md.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from twinstep.contract.compat import Compat

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "reference" / "edges.md"
COUNTS = {"LS": 16, "OV": 8, "NM": 13, "ME": 4, "FA": 9, "LB": 6, "FP": 13, "UF": 9, "BF": 16}
COUNTS |= {"Z": 29, "TF": 9, "CK": 16, "CA": 5, "EN": 6}
TITLES = {
    "LS": "Loss scaling",
    "OV": "Overflow detection",
    "NM": "Norms and clipping",
    "ME": "Mixture of experts",
    "FA": "FusedAdam",
    "LB": "FusedLamb",
    "FP": "FP16Optimizer",
    "UF": "FP16UnfusedOptimizer",
    "BF": "BF16Optimizer",
    "Z": "ZeroOptimizer",
    "TF": "Fragments",
    "CK": "Checkpoints",
    "CA": "Adam on the CPU",
    "EN": "Engine",
}
INTRODUCTION = """\
# Edges: where upstream surprises, and what was decided

Written by `python -m twinstep.parity.proof.upstream.edges` from
`parity/proof/upstream/edges.toml`; do not edit.

The default is correct. A decision is one of these:

- `same`: upstream (DeepSpeed 0.19.8) is right, and we agree with it.
- `correct`: upstream is not, or disagrees with itself; we follow the reason.
- `compat:field`: correct by default, upstream's behaviour under that field of `Compat`.
- `out`: not our business.

A row with a test is proved by it; a row that waits names a component of ours that is not built yet.
"""
DECISIONS = ("correct", "same", "out")
COMPAT = "compat:"


@dataclass(frozen=True, kw_only=True)
class Edge:
    """An edge, the decision about it, and its proof.

    Attributes:
        id: prefix and number.
        upstream: what surprises there, in our words.
        decision: "correct", "same", "compat:<field of Compat>" or "out".
        reason: why, one sentence or two.
        test: pytest node id that proves it; empty while the component is not built.
        waits_for: class or module of the reference that will carry it and does not exist yet.
    """

    id: str
    upstream: str
    decision: str
    reason: str
    test: str = ""
    waits_for: str = ""


ROWS = tuple(
    Edge(id=name, **row)
    for name, row in tomllib.loads(Path(__file__).with_name("edges.toml").read_text()).items()
)


def edge_ids() -> list[str]:
    """Every id that needs a row."""
    return [f"{prefix}-{n}" for prefix, count in COUNTS.items() for n in range(1, count + 1)]


def node_ids(root: Path) -> set[str]:
    """Node ids of all test functions under root/tests, read from source, nothing imported."""
    found = set()
    for path in sorted((root / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.add(f"{path.relative_to(root)}::{node.name}")
    return found


def built(root: Path) -> set[str]:
    """Names of all classes and modules under root/reference and root/contract."""
    found = set()
    for path in sorted([*(root / "reference").rglob("*.py"), *(root / "contract").rglob("*.py")]):
        found.add(path.stem)
        tree = ast.walk(ast.parse(path.read_text()))
        found |= {node.name for node in tree if isinstance(node, ast.ClassDef)}
    return found


def faults(rows: tuple[Edge, ...], tests: set[str], components: set[str]) -> list[str]:
    """Faults of a table, one sentence each.

    Args:
        rows: the table.
        tests: node ids that exist.
        components: classes and modules of the reference that exist.
    """
    ids = [row.id for row in rows]
    said = [f"{i} has no row" for i in edge_ids() if i not in ids]
    said += [f"{i} has a row, but is no known edge" for i in ids if i not in edge_ids()]
    said += [f"{i} has {ids.count(i)} rows" for i in sorted(set(ids)) if ids.count(i) > 1]
    for row in rows:
        said += [f"{row.id} {fault}" for fault in _faults_of(row, tests, components)]
    return said


def _faults_of(row: Edge, tests: set[str], components: set[str]) -> Iterator[str]:
    names = {field.name for field in fields(Compat)}
    if row.decision.startswith(COMPAT):
        name = row.decision.removeprefix(COMPAT)
        if name not in names:
            yield f"selects {name}, which is no field of Compat"
    elif row.decision not in DECISIONS:
        yield f"has decision {row.decision!r}, which is none of {', '.join(DECISIONS)}, compat:…"
    if not row.reason:
        yield "gives no reason"
    if row.decision == "out" and (row.test or row.waits_for):
        yield "is out, but names a test or a component"
    if row.decision != "out" and bool(row.test) == bool(row.waits_for):
        yield "should name either a test or the component that is not built yet"
    if row.test and row.test not in tests:
        yield f"names {row.test}, which does not exist"
    if row.waits_for in components:
        yield f"waits for {row.waits_for}, which exists"


def page(rows: tuple[Edge, ...]) -> str:
    """docs/reference/edges.md as text."""
    lines = INTRODUCTION.splitlines()
    for prefix, title in TITLES.items():
        chosen = [row for row in rows if row.id.startswith(prefix)]
        lines += ["", f"## {title}", "", "| edge | upstream | decision | reason | proof |"]
        lines += ["| --- | --- | --- | --- | --- |"]
        lines += [_line(row) for row in chosen]
    proved = sum(bool(row.test) for row in rows)
    lines += ["", f"{len(rows)} edges: {proved} proved by a test, {_waiting(rows)} waiting."]
    return "\n".join(lines) + "\n"


def _waiting(rows: tuple[Edge, ...]) -> int:
    return sum(bool(row.waits_for) for row in rows)


def _line(row: Edge) -> str:
    proof = f"`{row.test}`" if row.test else "-"
    if row.waits_for:
        proof = f"waits: {row.waits_for} is not built yet"
    return f"| {row.id} | {row.upstream} | {row.decision} | {row.reason} | {proof} |"


def main() -> int:
    """Write docs/reference/edges.md; exit code 1 when the table has faults."""
    said = faults(ROWS, node_ids(ROOT), built(ROOT))
    if said:
        print("\n".join(said), file=sys.stderr)
        return 1
    PAGE.write_text(page(ROWS))
    print(f"{PAGE.relative_to(ROOT)}: {len(ROWS)} edges, {_waiting(ROWS)} waiting")
    return 0


if __name__ == "__main__":
    sys.exit(main())
