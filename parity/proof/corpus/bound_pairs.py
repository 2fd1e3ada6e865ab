"""Kernels at a chosen distance from their bound: what shows that the bounds are tight.

Two sorts for every operation and dtype combination in which an honest kernel has any freedom:

- honest: the reference's own arithmetic, claimed to be bounded (`as_written`). A search finds
  inputs on which its plain fp32 roundings reach 0.3 of the bound or more.
- constructed: `off_by(operation, bounds)` evaluates the reference with its bounds and moves every
  result by that many of them, towards the nearest tie of the stored dtype. Nobody would write it.
  At 3 bounds it has to fail; at 0.4 it stands in for the honest kernel where that comes nowhere
  near its bound (`CONSTRUCTED`): an exact norm, and factors formed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from twinstep.parity.cases.case import Case, Recipe
from twinstep.parity.expected.accepted import Accepted
from twinstep.parity.expected.instruction_error import CPU
from twinstep.parity.expected.outputs import accepted_outputs
from twinstep.parity.operations.operation import Bound, Operation, OptionValue
from twinstep.parity.operations.table import operations
from twinstep.parity.registry.kernels import Kernel

REACHED = 0.3
NEAR, FAR = 0.4, 3.0
CONSTRUCTED = frozenset({"global_norm", "clip_factor", "clip_coefficient"})
DETERMINED = {
    ("cast_copy", "fp32"): "a copy",
    ("cast_copy", "fp16"): "one rounding",
    ("cast_copy", "bf16"): "one rounding",
    ("accumulate", "bf16-pure"): "no sum of two bf16 numbers comes within reach of a tie",
}
"""Where every honest kernel gives the same bits, so that there is no bound to be near to."""


def pairs() -> list[tuple[Operation, str]]:
    """Operations and dtype combinations in which an honest kernel may differ from the reference."""
    return [
        (operation, dtype)
        for operation in operations()
        if operation.bound is not Bound.EXACT
        for dtype in operation.combinations
        if (operation.name, dtype) not in DETERMINED
    ]


def near(operation: Operation) -> Kernel:
    """A kernel that reaches `REACHED` of its bound and keeps it."""
    return off_by(operation, NEAR) if operation.name in CONSTRUCTED else as_written(operation)


def off_by(operation: Operation, bounds: float) -> Kernel:
    """A kernel whose every result is this many bounds from the truth."""

    def function(*lists: Sequence[Tensor], **keywords: Tensor | OptionValue) -> None:
        case = _case(operation, lists, keywords)
        outputs = accepted_outputs(case, "bounded", CPU)
        for name in operation.writes:
            targets = case.lists[name] if name in case.lists else [case.controls[name]]
            for target, accepted in zip(targets, outputs[name], strict=True):
                target.copy_(displaced(accepted, bounds))

    return Kernel(
        name=f"{operation.name}_off_by_{bounds:g}",
        operation=operation,
        function=function,
        arithmetic="bounded",
        dtypes=tuple(operation.combinations),
        layouts=operation.layouts,
        engines=("cpu",),
        place=f"{Path(__file__)}:1",
    )


def as_written(operation: Operation) -> Kernel:
    """The reference's own arithmetic, claimed to be bounded: honest, and no closer than it is."""

    def function(*lists: Sequence[Tensor], **keywords: Tensor | OptionValue) -> None:
        case = _case(operation, lists, keywords)
        for name, results in case.reference().items():
            targets = case.lists[name] if name in case.lists else [case.controls[name]]
            for target, result in zip(targets, results, strict=True):
                target.copy_(result)

    return replace(off_by(operation, 0.0), name=f"{operation.name}_as_written", function=function)


def _case(
    operation: Operation,
    lists: Sequence[Sequence[Tensor]],
    keywords: dict[str, Tensor | OptionValue],
) -> Case:
    rows = zip(operation.lists, lists, strict=True)
    return Case(
        operation=operation,
        combination="",
        lists={argument.name: list(tensors) for argument, tensors in rows},
        controls={k: v for k, v in keywords.items() if isinstance(v, Tensor)},
        options={k: v for k, v in keywords.items() if not isinstance(v, Tensor)},
        skews={},
        guard=0,
        recipe=Recipe(layout="list", sizes=()),
    )


def displaced(accepted: Accepted, bounds: float) -> Tensor:
    """The wanted value moved away from the exact one; the value itself where nothing is bounded."""
    if accepted.exact is None or accepted.bound is None or accepted.zone is None:
        return accepted.value
    moved = accepted.exact + bounds * accepted.bound * _towards_a_tie(accepted)
    finite = torch.isfinite(moved) & ~accepted.zone
    return torch.where(finite, moved.to(accepted.value.dtype), accepted.value)


def _towards_a_tie(accepted: Accepted) -> Tensor:
    """+1 or -1: where the stored dtype changes first."""
    assert accepted.exact is not None
    stored = accepted.exact.to(accepted.value.dtype).to(torch.float64)
    return torch.where(accepted.exact >= stored, 1.0, -1.0).to(torch.float64)
