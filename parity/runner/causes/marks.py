"""Mistakes that any operation can make, known by the marks that they leave in what was written."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from twinstep.parity.cases.case import Case
from twinstep.parity.expected.outputs import accepted_outputs, truths
from twinstep.parity.expected.ulp import same
from twinstep.parity.operations.operation import Operation, Role
from twinstep.parity.runner.causes.evidence import Cause, Evidence, Masks, Place

OUTSIDE = re.compile(r"of (\d+) bytes at .* byte offset (-?\d+) of \S+ \((\d+) bytes\)")
NARROW = (torch.float16, torch.bfloat16)
# Most runs of one kernel on one state that are recognised where no step count tells their number.
RUNS = 8
# A step count that moved by more is no number of runs.
COUNTED = 1_000


def mark_causes(operation: Operation) -> list[Cause]:
    """Mistakes with skipped steps, copies, roundings and sums of squares."""
    found = [Cause(says="low-precision results are cut off, but should be rounded", fits=truncated)]
    if operation.skippable and operation.lists_of(Role.STEPS):
        found.append(Cause(says="a skipped step is counted in steps", fits=counted))
    if operation.lists_of(Role.PARAM) and operation.lists_of(Role.OUTPUT):
        found.append(Cause(says="copies are made of the weights before the step", fits=stale))
    if "norm" in operation.writes and operation.lists_of(Role.GRAD):
        limits = {"fp16": 65504.0, "fp32": float(torch.finfo(torch.float32).max)}
        found += [
            Cause(says=f"the sum of squares overflows in {name}", fits=_overflowing(largest))
            for name, largest in limits.items()
        ]
    return found


WRAPS = "32-bit index overflow: element 2^31 and beyond"
KEPT_IN_FP32 = "an index is kept in fp32: element 2^24 and beyond"
REPEATED = "the operation is applied more than once to the same data"


def repeat_causes(operation: Operation) -> list[Cause]:
    """Mistakes of what calls the kernel; another one may give the same as two runs."""
    return [Cause(says=REPEATED, fits=repeated)] if operation.lists else []


def index_cause(failure: str, ends: Sequence[str] = ()) -> Cause | None:
    """The mistake of an index of few bits, if an address or the wrong places of a tensor show it.

    Args:
        failure: with which the call ended; the address lies inside if the index does not wrap.
        ends: places of a tensor of more than 2³¹ elements that are wrong, see `LargePlaces`.
    """
    if found := OUTSIDE.search(failure):
        read, offset, size = map(int, found.groups())
        # An access may be of several elements.
        spans = [width << 32 for width in (1, 2, 4, 8) if width <= read]
        if offset < 0 and any(-size <= offset and offset % s < size for s in spans):
            return Cause(says=WRAPS, fits=lambda evidence: None)
    if "first" in ends or not {"last", "past 2**24"} & set(ends):
        return None
    says = KEPT_IN_FP32 if "past 2**24" in ends else WRAPS
    return Cause(says=says, fits=lambda evidence: None)


def counted(evidence: Evidence) -> Masks | None:
    """Only the step counts moved, by one, although found_inf is set."""
    found_inf = evidence.case.controls.get("found_inf")
    if found_inf is None or not bool(found_inf != 0):
        return None
    names = evidence.case.operation.lists_of(Role.STEPS)
    return {
        place: got == evidence.before(place) + 1 if place[0] in names else evidence.unchanged(place)
        for place, got in evidence.got.items()
    }


def stale(evidence: Evidence) -> Masks | None:
    """Copies hold the old weights, rounded, although the step is made; all else is right."""
    if bool(evidence.case.controls.get("found_inf", torch.zeros(())) != 0):
        return None
    (weights,) = evidence.case.operation.lists_of(Role.PARAM)
    copies = evidence.case.operation.lists_of(Role.OUTPUT)
    masks = dict(evidence.accepted())
    for (name, index), got in evidence.got.items():
        if name in copies:
            old = evidence.case.lists[weights][index]
            masks[name, index] = same(got, old.to(got.dtype))
    return masks


def truncated(evidence: Evidence) -> Masks | None:
    """Results of few bits are the exact ones without the digits that do not fit."""
    if not any(got.dtype in NARROW for got in evidence.got.values()):
        return None
    known, masks = truths(evidence.case), dict(evidence.accepted())
    for place, got in evidence.got.items():
        truth = known.get(place)
        if truth is None or got.dtype not in NARROW:
            continue
        low, high = (
            _cut((truth.exact + sign * truth.error).reshape(got.shape), got.dtype)
            for sign in (-1.0, 1.0)
        )
        usual = (~truth.exact.isfinite() | truth.zone).reshape(got.shape)
        # A NaN whose payload is cut off is an infinity.
        wild = masks[place] | ~got.isfinite()
        masks[place] = (got >= low) & (got <= high) | (usual & wild)
    return masks


def _cut(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest number of the dtype that is not further from zero."""
    rounded = exact.to(dtype)
    beyond = rounded.double().abs() > exact.abs()
    return torch.where(beyond, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)


def repeated(evidence: Evidence) -> Masks | None:
    """The state after several steps, but for roundings; one step is far from it."""
    case, counts = evidence.case, evidence.case.operation.lists_of(Role.STEPS)
    if not case.operation.lists or not set(case.operation.writes) & set(case.lists):
        return None
    moved = {
        int((got - evidence.before(place)).item())
        for place, got in evidence.got.items()
        if place[0] in counts
    }
    runs = moved.pop() if len(moved) == 1 else 0
    if runs > COUNTED:
        return None
    case = _stepped(case)
    once = _near(evidence, case, counts)
    if all(bool(mask.all()) for mask in once.values()):
        return None
    case = _stepped(case)
    for number in range(2, RUNS + 1 if runs <= 1 else runs + 1):
        masks = _near(evidence, case, () if runs > 1 else counts)
        if runs in (0, 1, number) and all(bool(mask.all()) for mask in masks.values()):
            return masks
        case = _stepped(case)
    return None


def _stepped(case: Case) -> Case:
    """The case after one step of the reference."""
    results = case.reference()
    lists = {name: results.get(name, tensors) for name, tensors in case.lists.items()}
    new = {name: results[name][0] for name in case.controls if name in results}
    return replace(case.with_lists(lists), controls={**case.controls, **new})


def _near(evidence: Evidence, case: Case, apart: Sequence[str]) -> Masks:
    """Elements that hold the state of a case up to the roundings of some steps."""
    found = {}
    for place, got in evidence.got.items():
        name, index = place
        want = case.controls[name] if name in case.controls else case.lists[name][index]
        if not got.dtype.is_floating_point or name in apart:
            found[place] = (got == want) | torch.tensor(name in apart)
            continue
        room = 8 * torch.finfo(got.dtype).eps + 1e-5
        near = (got.double() - want.double()).abs() <= room * want.double().abs() + 1e-30
        found[place] = near | same(got, want)
    return found


def _overflowing(largest: float) -> Callable[[Evidence], Masks | None]:
    def fits(evidence: Evidence) -> Masks | None:
        case = evidence.case
        grads = [x for name in case.operation.lists_of(Role.GRAD) for x in case.lists[name]]
        total = sum(float((x.double() ** 2).sum()) for x in grads)
        expected = accepted_outputs(evidence.case, "exact")["norm"][0].value
        if not (torch.isfinite(expected) and total > largest):
            return None
        masks: dict[Place, Tensor] = dict(evidence.accepted())
        masks["norm", 0] = torch.isinf(evidence.got["norm", 0])
        return masks

    return fits
