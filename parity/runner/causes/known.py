"""The known cause of a violation, if one gives the kernel's bits."""

from __future__ import annotations

from twinstep.parity.runner.causes.arguments import argument_causes
from twinstep.parity.runner.causes.evidence import Cause, Evidence, More, cause_of
from twinstep.parity.runner.causes.formulas import formula_causes
from twinstep.parity.runner.causes.marks import mark_causes, repeat_causes


def known_cause(evidence: Evidence, more: More) -> Cause | None:
    """The one known mistake that explains a call; see `cause_of`."""
    operation = evidence.case.operation
    own = [*formula_causes(operation), *argument_causes(operation), *mark_causes(operation)]
    # What runs twice may do so in its first call alone, as a tuner does.
    again = repeat_causes(operation)
    return cause_of(evidence, more, own) or cause_of(evidence, lambda: (), again)
