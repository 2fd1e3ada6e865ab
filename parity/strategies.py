"""Hypothesis strategies of cases, for property tests of one's own.

    from hypothesis import given
    from twinstep.parity.strategies import cases, violation

    @given(cases("adamw_step", "bf16"))
    def test_my_adamw(case):
        assert not violation(my_adamw, case)

A case has `lists`, `controls` and `options`, the arguments of a kernel, and `reference()`, the
results. Cases come from the recipes that the judge draws its own from, and shrink.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from hypothesis import strategies as st

from twinstep.parity.cases.case import Case, Recipe
from twinstep.parity.cases.covering import CLASSES, STEPS
from twinstep.parity.cases.generate import generate
from twinstep.parity.cases.regimes import REGIMES
from twinstep.parity.laws import LAWS
from twinstep.parity.operations.operation import LAYOUTS, Control, Operation, OptionValue
from twinstep.parity.operations.table import operation_named
from twinstep.parity.records.errors import UsageError
from twinstep.parity.registry.engines import engine_for, running
from twinstep.parity.registry.kernels import Kernel, kernels
from twinstep.parity.runner.failure import Failure
from twinstep.parity.runner.run_plan import PlanRunner

SIZES = tuple(sorted({0, *(size for sizes in CLASSES.values() for size in sizes)}))
TENSORS = 6


def cases(
    operation: str, combination: str, *, layouts: Sequence[str] = LAYOUTS
) -> st.SearchStrategy[Case]:
    """Cases of an operation.

    Args:
        operation: its name.
        combination: name of the dtype combination.
        layouts: `flat` (one tensor in each list), `list`, or both.

    Raises:
        UsageError: there is no such operation, or it has no such combination.
    """
    contract = operation_named(operation, "cases")
    if combination not in contract.combinations:
        known = ", ".join(contract.combinations)
        raise UsageError(f"{operation} has no {combination}, but one of {known} [cases]")
    chosen = [layout for layout in layouts if layout in contract.layouts] or ["list"]
    return _recipes(contract, chosen).map(lambda recipe: generate(contract, combination, recipe))


@st.composite
def _recipes(draw: st.DrawFn, operation: Operation, layouts: Sequence[str]) -> Recipe:
    """Everything that a recipe has, the plain and small first."""
    settings = {row.name: draw(_values(row)) for row in operation.controls}
    choices = {row.name: draw(st.sampled_from(row.choices)) for row in operation.options}
    together = draw(st.sampled_from(({}, *operation.together)))
    settings |= {name: float(value) for name, value in together.items() if name in settings}
    choices |= {n: cast(OptionValue, value) for n, value in together.items() if n in choices}
    layout = draw(st.sampled_from(layouts))
    most = 1 if layout == "flat" else TENSORS
    sizes = draw(st.lists(st.sampled_from(SIZES), min_size=layout == "flat", max_size=most))
    return Recipe(
        layout=layout,
        sizes=tuple(sizes) if operation.lists else (),
        regime=draw(st.sampled_from(REGIMES)),
        seed=draw(st.integers(0, 2**32 - 1)),
        controls=settings,
        options=choices,
        aligned=draw(st.booleans()),
        dims=draw(st.sampled_from((1, 0, 2, 3, 4))),
        requires_grad=draw(st.booleans()),
        absent=draw(st.booleans()),
        one_step=draw(st.booleans()),
        step=draw(st.integers(0, len(STEPS) - 1)),
    )


def _values(control: Control) -> st.SearchStrategy[float]:
    """The listed values of a control, and its range."""
    listed = st.sampled_from(control.values)
    if control.range is None:
        return listed
    whole = control.dtype == torch.int64
    drawn = st.floats(0.0, 1.0).map(control.range.at)
    return listed | (drawn.map(lambda x: float(int(x))) if whole else drawn)


def violation(kernel: Kernel | Callable[..., object], case: Case) -> str:
    """The report of a kernel whose results on a case differ from the reference; empty if none does.

    Args:
        kernel: a function that `register` decorated, or its registration.
        case: from `cases`, on a dtype combination that the kernel claims.

    Raises:
        UsageError: the kernel is not registered.
    """
    rows = [row for row in kernels() if kernel in (row, row.function)]
    if isinstance(kernel, Kernel):
        rows = [kernel]
    if not rows:
        raise UsageError(f"{kernel!r} is not registered, but should be [violation]")
    row, law, engine = rows[0], LAWS["value"], engine_for(rows[0])
    with running(engine):
        finding = PlanRunner(row, engine).violation(law.plan(case, row.arithmetic))
    if finding is None:
        return ""
    failure = Failure(
        kernel=row, engine=engine.name, law=law.name, case=case, original=case, finding=finding
    )
    return failure.text()
