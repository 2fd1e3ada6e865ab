"""Mistakes with arguments: one that is ignored, inverted, exchanged or replaced by its default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from twinstep.parity.cases.case import Case
from twinstep.parity.operations.operation import Operation
from twinstep.parity.runner.causes.evidence import Cause, Evidence, Masks

CUSTOMARY = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "momentum": 0.9}
NEUTRAL = {"found_inf": 0.0, "factor": 1.0, "inv_scale": 1.0, "weight_decay": 0.0, "dampening": 0.0}
MULTIPLIERS = ("factor", "inv_scale")


def argument_causes(operation: Operation) -> list[Cause]:
    """Mistakes with the controls and options of an operation."""
    read = [row.name for row in operation.controls if not row.output]
    found = [
        _cause(
            f"{name} is lost as it came in" if name in operation.writes else f"{name} is ignored",
            _control(name, value),
        )
        for name, value in NEUTRAL.items()
        if name in read
    ]
    found += [
        _cause(f"{name} is ignored: {value:g} is used in its place", _control(name, value))
        for name, value in CUSTOMARY.items()
        if name in read
    ]
    for name in MULTIPLIERS:
        if name in read:
            found.append(_cause(f"divides by {name}, but should multiply", _power(name, -1)))
            found.append(_cause(f"{name} is applied twice", _power(name, 2)))
    if "beta1" in read and "beta2" in read:
        found.append(_cause("beta1 and beta2 are exchanged", _exchanged))
    found += [
        _cause(f"{row.name} is ignored: it is taken for {choice}", _option(row.name, choice))
        for row in operation.options
        for choice in row.choices
    ]
    return found


def _cause(says: str, change: Callable[[Case], Case]) -> Cause:
    def fits(evidence: Evidence) -> Masks | None:
        return evidence.with_case(change(evidence.case))

    return Cause(says=says, fits=fits)


def _control(name: str, value: float) -> Callable[[Case], Case]:
    return lambda case: case.with_controls(**{name: value})


def _power(name: str, exponent: int) -> Callable[[Case], Case]:
    return lambda case: case.with_controls(**{name: float(case.controls[name].item()) ** exponent})


def _exchanged(case: Case) -> Case:
    one, two = (float(case.controls[name].item()) for name in ("beta1", "beta2"))
    return case.with_controls(beta1=two, beta2=one)


def _option(name: str, choice: bool | int | str) -> Callable[[Case], Case]:
    return lambda case: replace(case, options={**case.options, name: choice})
