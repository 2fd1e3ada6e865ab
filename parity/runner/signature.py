"""Signature of a failure: what two failures of one kernel have in common if one defect makes both.

A known cause decides where one is found. Without one, the kind of violation and what is wrong do: a
defect that moves values moves them under every law, and a formula or a metamorphic law that breaks
in an argument whose values are wrong says nothing more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from twinstep.parity.laws.finding import Finding
from twinstep.parity.runner.causes.evidence import Cause, Evidence, More
from twinstep.parity.runner.causes.known import known_cause
from twinstep.parity.runner.causes.marks import index_cause

PLACE = re.compile(r"[^\s\[]+\.py:\d+")
OF_VALUES = ("value", "formula", "dependence")


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Signature of one failure.

    Attributes:
        law: that is broken.
        sort: of the violation.
        wrong: arguments whose values are wrong, or the exception and its place.
        cause: the known mistake that gives the values, if there is one.
        evidence: the call, if it has results.
    """

    law: str
    sort: str
    wrong: frozenset[str]
    cause: Cause | None = None
    evidence: Evidence | None = None

    def explains(self, other: Signature) -> bool:
        """True if one defect is enough for both failures."""
        if self.cause is not None and other.cause is not None:
            return self.cause.says == other.cause.says
        if self.cause is None and other.cause is not None:
            return False
        of_values = self.sort in OF_VALUES and other.sort in OF_VALUES
        if not of_values and (self.sort != other.sort or self.cause is not None):
            return False
        if self.cause is not None and other.evidence is not None and other.sort == "value":
            return self.cause.gives_wrong(other.evidence)
        return bool(self.wrong & other.wrong)


def signature_of(
    law: str,
    finding: Finding,
    evidence: Evidence | None,
    more: More,
    likely: Sequence[Cause] = (),
) -> Signature:
    """The signature of a violation.

    Args:
        law: that is broken.
        finding: the violation.
        evidence: its call, if that has results.
        more: other calls of the same kernel, which a known cause must explain too.
        likely: causes of other failures of the kernel; one that gives all that is wrong is taken.
    """
    if evidence is None:
        cause, what = index_cause(finding.failure), frozenset({_what(finding)})
        return Signature(law=law, sort=finding.sort, wrong=what, cause=cause)
    wrong = {name for (name, _), mask in evidence.accepted().items() if not bool(mask.all())}
    cause = next((one for one in likely if one.gives_wrong(evidence)), None)
    return Signature(
        law=law,
        sort=finding.sort,
        wrong=frozenset(wrong | {finding.name}),
        cause=cause or known_cause(evidence, more) or index_cause("", finding.ends),
        evidence=evidence,
    )


def _what(finding: Finding) -> str:
    """The argument, or the exception and where it is raised."""
    if not finding.failure:
        return finding.name or finding.says
    place = PLACE.search(finding.failure)
    return finding.failure.partition(":")[0] + (f" at {place[0]}" if place else "")
