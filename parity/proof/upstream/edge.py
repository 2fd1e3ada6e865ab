"""One row of the edge table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[3] / "tests"


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


def proved(id: str, upstream: str, decision: str, reason: str, test: str) -> Edge:
    """A row with a test, named as `module::function` without the folder and `test_`."""
    module, name = test.split("::")
    (file,) = TESTS.glob(f"*/test_{module}.py")
    node = f"tests/{file.parent.name}/{file.name}::test_{name}"
    return Edge(id=id, upstream=upstream, decision=decision, reason=reason, test=node)


def waits(id: str, upstream: str, decision: str, reason: str, component: str) -> Edge:
    """A row about a component that is not built yet."""
    return Edge(id=id, upstream=upstream, decision=decision, reason=reason, waits_for=component)


def out(id: str, upstream: str, reason: str) -> Edge:
    """A row about something that is not our business."""
    return Edge(id=id, upstream=upstream, decision="out", reason=reason)
