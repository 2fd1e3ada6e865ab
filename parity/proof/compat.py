"""torch's own table of optimizer tests, run against `FusedAdam` of both sides.

`python -m twinstep.parity.proof.compat` (`make compat`) reads `optim_db`, which torch ships for its
tests, and writes docs/reference/compat.md: inputs of Adam and AdamW with four steps beside torch's,
inputs that are errors there, and pairs of schedulers. Nothing of torch's is copied.
"""

from __future__ import annotations

import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

import twinstep.fast.optimizers.fused_adam
import twinstep.reference.optimizers.fused_adam
import twinstep.replay

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "compat.md"
SIDES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "reference": twinstep.reference.optimizers.fused_adam.FusedAdam,
    "fast": twinstep.fast.optimizers.fused_adam.FusedAdam,
}
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
HEAD = """# torch's own table of optimizer tests

`make compat` writes this page. torch ships `optim_db`, the table that its optimizer tests are made
from; here `FusedAdam` of both sides takes the place of Adam and AdamW, on the CPU (the fast side on
replay). Inputs: four steps end within 1e-5 of torch's. Errors: the same class of error or warning.
Schedulers: four rates are equal. Torch {torch}: {passed} of {total} runs as torch's own class.

| kind | case | outcome | side |
| --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Outcome:
    """One case on one side.

    Attributes:
        kind: of the case.
        case: torch's description.
        side: of SIDES.
        passed: as torch expects.
        why: it did not, a known reason or the error.
    """

    kind: str
    case: str
    side: str
    passed: bool
    why: str = ""

    @property
    def known(self) -> bool:
        """True if it passed, or did not for a reason that is written down."""
        return self.passed or self.why in (*REFUSED.values(), *TAKEN.values())


def optim_table() -> types.ModuleType:
    """`optim_db` of the installed torch; its tests want a package that none of it needs."""
    stub = types.ModuleType("expecttest")
    stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", stub)
    from torch.testing._internal import common_optimizers

    return common_optimizers


def run_input(kind: type[torch.optim.Optimizer], given: Mapping[str, object], side: str) -> str:
    """Step a class of ours and torch's with the same numbers; empty if they end alike.

    Args:
        kind: of torch.
        given: keywords of the constructor.
        side: of SIDES.
    """
    own = dict(given)
    if kind is torch.optim.Adam:
        own["adam_w_mode"] = bool(own.pop("decoupled_weight_decay", False))
    own.setdefault("weight_decay", 0.01 if kind is torch.optim.AdamW else 0.0)
    ends = []
    makes: list[tuple[Any, dict[str, object]]] = [(kind, dict(given)), (SIDES[side], own)]
    for make, options in makes:
        param = Parameter(torch.tensor([1.0, -2.0, 0.5]))
        try:
            optimizer = make([param], **options)
            for step in range(4):
                param.grad = torch.tensor([0.5, -1.0 + step, 2.0])
                optimizer.step()
        except (RuntimeError, TypeError, ValueError) as error:
            return str(error)
        ends.append(param.detach())
    return (
        "" if torch.allclose(ends[0], ends[1], rtol=1e-5, atol=1e-6) else f"{ends[0]} and {ends[1]}"
    )


def run_error(
    params: object, options: Mapping[str, object], expected: type[BaseException], side: str
) -> str:
    """Construct with what torch refuses; empty if the same kind of error or warning is raised."""
    given = [Parameter(torch.ones(2))] if params is None else params
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            SIDES[side](given, **options)
    except expected:
        return ""
    except Exception as error:
        return f"{type(error).__name__} for {expected.__name__}: {error}"
    return NONE


def run_schedulers(side: str, chain: Sequence[Callable[[torch.optim.Optimizer], object]]) -> str:
    """Four rates of chained schedulers over torch's AdamW and ours; empty if they are equal."""
    rates: list[list[float]] = []
    for kind in (torch.optim.AdamW, SIDES[side]):
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
    return "" if rates[0] == rates[1] else str(rates)


def outcomes(db: types.ModuleType) -> Iterator[Outcome]:
    """Yield every case of torch's table for Adam and AdamW, on both sides."""
    for info in db.optim_db:
        if info.optim_cls not in (torch.optim.Adam, torch.optim.AdamW):
            continue
        for side in SIDES:
            yield from _of_class(info, side)


def _of_class(info: Any, side: str) -> Iterator[Outcome]:
    name = info.optim_cls.__name__
    for given in info.optim_inputs_func(device="cpu"):
        found = run_input(info.optim_cls, given.kwargs, side)
        yield judged("inputs", f"{name}: {given.desc}", side, found)
    for wrong in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
        given = wrong.optimizer_error_input
        found = run_error(given.params, given.kwargs, wrong.error_type, side)
        yield judged("errors", f"{name}: {given.desc}", side, found)
    for place, chain in enumerate(info.scheduler_inputs):
        found = run_schedulers(side, chain)
        yield judged("schedulers", f"{name}: schedulers, list {place}", side, found)


def judged(kind: str, case: str, side: str, found: str) -> Outcome:
    """The outcome of a case; any other failure than the known one stays as it is."""
    why = found
    for name, reason in REFUSED.items():
        if found.startswith(f"{name}=True, but should be False"):
            why = reason
    for part, reason in TAKEN.items():
        if found == NONE and part in case:
            why = reason
    return Outcome(kind, case, side, not found, why)


def main() -> int:
    """Write the page; exit code 1 if a case fails for a reason that is not known."""
    twinstep.replay.activate()
    found = list(outcomes(optim_table()))
    PAGE.write_text(page(found))
    print(f"{PAGE.relative_to(ROOT)}: {sum(one.passed for one in found)} of {len(found)} as torch")
    unknown = [one for one in found if not one.known]
    for one in unknown:
        print(f"{one.side}, {one.kind}, {one.case}: {one.why}")
    return 1 if unknown else 0


def page(found: list[Outcome]) -> str:
    """The page: a row for each case, the same on both sides or one after the other."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for one in found:
        rows.setdefault((one.kind, one.case, one.why or "as torch"), []).append(one.side)
    lines = [
        f"| {k} | {case} | {why} | {' and '.join(dict.fromkeys(sides))} |"
        for (k, case, why), sides in rows.items()
    ]
    passed = sum(one.passed for one in found)
    return HEAD.format(torch=torch.__version__.split("+")[0], passed=passed, total=len(found)) + (
        "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
