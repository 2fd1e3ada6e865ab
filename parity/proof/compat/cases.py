"""One test of another project, and its outcome on one side.

A test raises `Differs` where a number is another than expected; any other error is an outcome, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import twinstep.fast.optimizers.apex_lamb
import twinstep.fast.optimizers.bf16
import twinstep.fast.optimizers.fp16
import twinstep.fast.optimizers.fp16_unfused
import twinstep.fast.optimizers.fused_adam
import twinstep.fast.optimizers.fused_lamb
import twinstep.fast.optimizers.scalers
import twinstep.reference.optimizers.apex_lamb
import twinstep.reference.optimizers.bf16
import twinstep.reference.optimizers.fp16
import twinstep.reference.optimizers.fp16_unfused
import twinstep.reference.optimizers.fused_adam
import twinstep.reference.optimizers.fused_lamb
import twinstep.reference.optimizers.scalers


@dataclass(frozen=True, kw_only=True)
class Side:
    """Classes of one side."""

    name: str
    adam: Callable[..., Any]
    lamb: Callable[..., Any]
    apex_lamb: Callable[..., Any]
    flat: Callable[..., Any]
    unfused: Callable[..., Any]
    bf16: Callable[..., Any]
    dynamic: Callable[..., Any]


FAST, REFERENCE = twinstep.fast.optimizers, twinstep.reference.optimizers
SIDES = (
    Side(
        name="reference",
        adam=REFERENCE.fused_adam.FusedAdam,
        lamb=REFERENCE.fused_lamb.FusedLamb,
        apex_lamb=REFERENCE.apex_lamb.FusedLAMB,
        flat=REFERENCE.fp16.FP16Optimizer,
        unfused=REFERENCE.fp16_unfused.FP16UnfusedOptimizer,
        bf16=REFERENCE.bf16.BF16Optimizer,
        dynamic=REFERENCE.scalers.DynamicLossScale,
    ),
    Side(
        name="fast",
        adam=FAST.fused_adam.FusedAdam,
        lamb=FAST.fused_lamb.FusedLamb,
        apex_lamb=FAST.apex_lamb.FusedLAMB,
        flat=FAST.fp16.FP16Optimizer,
        unfused=FAST.fp16_unfused.FP16UnfusedOptimizer,
        bf16=FAST.bf16.BF16Optimizer,
        dynamic=FAST.scalers.DynamicLossScale,
    ),
)
BY_NAME = {side.name: side for side in SIDES}


class Differs(Exception):
    """A number is another than the test expects."""


def expect(found: object, wanted: object, what: str) -> None:
    """Require that two values are equal.

    Raises:
        Differs: they are not.
    """
    if found != wanted:
        raise Differs(f"{what} is {found}, but should be {wanted}")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One test with one set of arguments.

    Attributes:
        project: whose test.
        test: its name there.
        case: arguments in words.
        run: raises where the outcome is another than there.
        known: part of the error that is expected here, and the reason; empty where none is.
    """

    project: str
    test: str
    case: str
    run: Callable[[Side], None]
    known: tuple[str, str] = ("", "")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One case on one side.

    Attributes:
        project: whose test.
        test: its name there, or the kind of a row of torch's table.
        case: arguments in words.
        side: of SIDES.
        why: it is otherwise than there; empty where it is not.
        known: `why` is a reason that is written down.
    """

    project: str
    test: str
    case: str
    side: str
    why: str = ""
    known: bool = True

    @property
    def passed(self) -> bool:
        """True if it is as there."""
        return not self.why


def outcome(case: Case, side: Side) -> Outcome:
    """Run a case on one side; an error is the reason that is known for it, or itself."""
    ended = Outcome(project=case.project, test=case.test, case=case.case, side=side.name)
    part, reason = case.known
    try:
        case.run(side)
    except Exception as error:
        words = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if part and part in words:
            return replace(ended, why=reason)
        return replace(ended, why=words, known=False)
    if part:
        return replace(ended, why=f"passes, and should not: {reason}", known=False)
    return ended


def outcomes(cases: Iterable[Case]) -> Iterator[Outcome]:
    """Yield every case on both sides."""
    for case in cases:
        for side in SIDES:
            yield outcome(case, side)
