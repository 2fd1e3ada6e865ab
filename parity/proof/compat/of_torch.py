"""torch's own table of optimizer tests: `optim_db`, which torch ships. Nothing of it is copied.

Inputs of Adam and AdamW end four steps within 1e-5 of torch's; inputs that are errors there raise
the same class of error or warning; pairs of schedulers give the same four rates. What torch's
`test_optim` does with each input beside that is in `torch_checks`.
"""

from __future__ import annotations

import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter

from twinstep.parity.proof.compat.cases import Case, Differs, Side, expect
from twinstep.parity.proof.compat.torch_checks import CHECKS

# Asked for, these are refused in our own sentence.
REFUSED = {
    "amsgrad": "refused: there is no running maximum of the second moment",
    "maximize": "refused: negate the loss",
}
# Errors of torch by their description; here they are no errors.
TAKEN = {
    "weight_decay should > 0": "taken: weight decay may be negative",
    "lr as Tensor doesn't": "taken: a tensor is read at every step, on any way",
    "betas must be either": "taken: each beta may be a number or a tensor",
    "betas\\[0\\] as a Tensor": "taken: a tensor is read at every step, on any way",
}
NONE = "no error"


def optim_table() -> types.ModuleType:
    """`optim_db` of the installed torch; its tests want a package that none of it needs."""
    stub = types.ModuleType("expecttest")
    stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", stub)
    from torch.testing._internal import common_optimizers

    return common_optimizers


def own_options(
    kind: type[torch.optim.Optimizer], given: Mapping[str, object]
) -> dict[str, object]:
    """Keywords of ours for the step of one of torch's classes."""
    own = dict(given)
    if kind is torch.optim.Adam:
        own["adam_w_mode"] = bool(own.pop("decoupled_weight_decay", False))
    own.setdefault("weight_decay", 0.01 if kind is torch.optim.AdamW else 0.0)
    return own


def run_input(kind: type[torch.optim.Optimizer], given: Mapping[str, object], side: Side) -> None:
    """Step a class of ours and torch's with the same numbers.

    Args:
        kind: of torch.
        given: keywords of the constructor.
        side: whose class takes its place.

    Raises:
        Differs: they do not end alike.
    """
    ends = []
    makes: list[tuple[Any, dict[str, object]]] = [(kind, dict(given))]
    makes.append((side.adam, own_options(kind, given)))
    for make, options in makes:
        param = Parameter(torch.tensor([1.0, -2.0, 0.5]))
        optimizer = make([param], **options)
        for step in range(4):
            param.grad = torch.tensor([0.5, -1.0 + step, 2.0])
            optimizer.step()
        ends.append(param.detach())
    if not torch.allclose(ends[0], ends[1], rtol=1e-5, atol=1e-6):
        raise Differs(f"{ends[1].tolist()}, but should be {ends[0].tolist()}")


def run_error(
    params: object, options: Mapping[str, object], expected: type[BaseException], side: Side
) -> None:
    """Construct with what torch refuses.

    Raises:
        Differs: no error or warning is raised, or one of another class.
    """
    given = [Parameter(torch.ones(2))] if params is None else params
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            side.adam(given, **options)
    except expected:
        return
    except Exception as error:
        raise Differs(f"{type(error).__name__} for {expected.__name__}: {error}") from error
    raise Differs(NONE)


def run_schedulers(chain: Sequence[Callable[[torch.optim.Optimizer], object]], side: Side) -> None:
    """Four rates of chained schedulers over torch's AdamW and ours."""
    rates: list[list[float]] = []
    for kind in (torch.optim.AdamW, side.adam):
        optimizer: Any = kind([Parameter(torch.ones(1))], lr=0.5)
        schedulers: list[Any] = [make(optimizer) for make in chain]
        found = []
        for _ in range(4):
            optimizer.step()
            for scheduler in schedulers:
                plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                scheduler.step(*((1.0,) if plateau else ()))
            found.append(float(optimizer.param_groups[0]["lr"]))
        rates.append(found)
    expect(rates[1], rates[0], "rates")


def cases(db: types.ModuleType) -> Iterator[Case]:
    """Yield every row of torch's table for Adam and AdamW."""
    for info in db.optim_db:
        if info.optim_cls in (torch.optim.Adam, torch.optim.AdamW):
            yield from _of_class(info)


def _of_class(info: Any) -> Iterator[Case]:
    kind, name = info.optim_cls, info.optim_cls.__name__
    for given in info.optim_inputs_func(device="cpu"):
        known = _refused(given.kwargs)
        case = f"{name}: {given.desc}"
        yield _case("inputs", case, partial(run_input, kind, given.kwargs), known)
        if not known[0]:
            for check in CHECKS:
                made = partial(check, own_options(kind, given.kwargs))
                yield _case(check.__name__, case, made)
    for wrong in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
        given = wrong.optimizer_error_input
        run = partial(run_error, given.params, given.kwargs, wrong.error_type)
        reasons = [reason for part, reason in TAKEN.items() if part in given.desc]
        known = (NONE, reasons[0]) if reasons else ("", "")
        yield _case("errors", f"{name}: {given.desc}", run, known)
    for place, chain in enumerate(info.scheduler_inputs):
        yield _case("schedulers", f"{name}: list {place}", partial(run_schedulers, chain))


def _refused(options: Mapping[str, object]) -> tuple[str, str]:
    """What is said of options that are asked for and missing here."""
    for name, reason in REFUSED.items():
        if options.get(name):
            return f"{name}=True, but should be False", reason
    return "", ""


def _case(
    test: str, case: str, run: Callable[[Side], None], known: tuple[str, str] = ("", "")
) -> Case:
    return Case(project="torch", test=test, case=case, run=run, known=known)
