"""Evidence of one call: its case and all that the kernel wrote, and where another formula fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twinstep.parity.cases.case import Case
from twinstep.parity.expected.instruction_error import UNKNOWN, InstructionError
from twinstep.parity.expected.outputs import AcceptedOutputs, accepted_outputs
from twinstep.parity.expected.ulp import same

Place = tuple[str, int]
Masks = Mapping[Place, Tensor]
More = Callable[[], "Sequence[Evidence]"]
Reference = Callable[..., tuple[object, ...]]


@dataclass(frozen=True)
class Evidence:
    """One call with its results.

    Attributes:
        case: its arguments.
        got: what it wrote, by argument and index.
        arithmetic: what the kernel claims.
        instruction_error: what its instructions add to the bounds.
    """

    case: Case
    got: Mapping[Place, Tensor]
    arithmetic: str
    instruction_error: InstructionError = UNKNOWN

    def accepted(self) -> Masks:
        """Elements that the reference accepts."""
        return self.fits(accepted_outputs(self.case, self.arithmetic, self.instruction_error))

    def with_reference(self, reference: Reference) -> Masks:
        """Elements that fit another reference, within its bounds."""
        other = replace(self.case.operation, reference=reference)
        return self.with_case(replace(self.case, operation=other))

    def with_case(self, case: Case) -> Masks:
        """Elements that fit the reference on another case, within its bounds if it has any."""
        try:
            outputs = accepted_outputs(case, "bounded", self.instruction_error)
        except TypeError:
            outputs = accepted_outputs(case, "exact")
        return self.fits(outputs)

    def fits(self, outputs: AcceptedOutputs) -> Masks:
        """Elements that lie in these intervals."""
        return {(name, i): outputs[name][i].accepts(x) for (name, i), x in self.got.items()}

    def before(self, place: Place) -> Tensor:
        """Content of a written argument before the call."""
        name, index = place
        known = self.case.lists.get(name)
        return self.case.controls[name] if known is None else known[index]

    def unchanged(self, place: Place) -> Tensor:
        """Elements that kept their bits."""
        return same(self.got[place], self.before(place))


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A known mistake.

    Attributes:
        says: the mistake, in a few words.
        fits: elements that hold what the mistake gives; None where it cannot be made, so that what
            it gives is right.
    """

    says: str
    fits: Callable[[Evidence], Masks | None]

    def gives(self, evidence: Evidence) -> bool:
        """True if every element of the call is what the mistake gives."""
        return self._all(evidence, {place: torch.ones(()) > 0 for place in evidence.got})

    def gives_wrong(self, evidence: Evidence) -> bool:
        """True if every element that the reference rejects is, and there are some."""
        wrong = {place: ~mask for place, mask in evidence.accepted().items()}
        return any(bool(mask.any()) for mask in wrong.values()) and self._all(evidence, wrong)

    def _all(self, evidence: Evidence, asked: Masks) -> bool:
        try:
            masks = self.fits(evidence) or evidence.with_case(evidence.case)
        except Exception:
            return False  # the reference refuses these arguments
        return all(bool((masks[place] | ~mask).all()) for place, mask in asked.items())


def cause_of(evidence: Evidence, more: More, known: Sequence[Cause]) -> Cause | None:
    """The one known mistake that gives every element of a wrong call; None for none or several.

    Args:
        evidence: the call.
        more: other calls of the same kernel, wrong or not, that the mistake must give as well.
        known: mistakes.
    """
    # A kernel that claims every bit may miss one honestly: no formula would stand out then.
    if all(bool(mask.all()) for mask in evidence.with_case(evidence.case).values()):
        return None
    found = [cause for cause in known if cause.gives(evidence)]
    if found:
        others = more()
        found = [cause for cause in found if all(cause.gives(other) for other in others)]
    return found[0] if len(found) == 1 else None
