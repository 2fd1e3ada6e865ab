"""Make a failing case small: one tensor, one element, plain numbers.

A smaller case must still be one that its law is about: the reference keeps the law on it. The
reducer works on the tensors themselves and starts from the place that was found wrong, so that
a few dozen calls are enough; a generic shrinker would need thousands.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twinstep.parity.cases.case import Case, is_counter
from twinstep.parity.cases.guarded_memory import GuardedMemory
from twinstep.parity.expected.accepted import Accepted
from twinstep.parity.laws.call import Outcome
from twinstep.parity.laws.finding import Finding
from twinstep.parity.laws.plan import Plan

Search = Callable[[Case], Finding | None]
Fair = Callable[[Case], bool]
SIMPLE = (0.0, 1.0, -1.0, 2.0, 0.5)
FEW = 6


@dataclass
class _Best:
    """The smallest failing case so far."""

    case: Case
    finding: Finding
    search: Search
    fair: Fair
    deadline: float

    def try_(self, candidate: Case) -> bool:
        """Keep the candidate if it fails in the same way, and accuses no right kernel."""
        if time.perf_counter() > self.deadline:
            return False
        try:
            finding = self.search(candidate)
            if finding is None or _way(finding) != _way(self.finding) or not self.fair(candidate):
                return False
        except Exception:
            return False
        self.case, self.finding = candidate, finding
        return True


def _way(finding: Finding) -> tuple[object, ...]:
    """Kind of a violation; of an exception its type too, of values whether they are NaN."""
    ends = [x is not None and bool(torch.isnan(x)) for x in (finding.got, finding.want)]
    return (finding.sort, finding.failure.partition(":")[0], *ends)


def reference_keeps(plan: Plan) -> bool:
    """True if the reference keeps the law of a plan, on the calls and checks of the plan itself.

    A case can lose what its law is about: found_inf under `skipped_step`, the planted infinity
    where a step looks for one. There every right kernel breaks the checks, as the reference does.
    """
    outcomes: list[Outcome] = []
    for call in plan.calls:
        if call.reuse is None:
            memory = GuardedMemory.of(call.case, torch.device("cpu"))
        else:
            memory = outcomes[call.reuse].memory.renewed(call.case)
        results = call.case.reference()
        for span in memory.spans:
            if span.name in results and span.value.numel():
                span.of(memory.block).copy_(results[span.name][span.index])
        accepted = {name: [Accepted(value=x) for x in xs] for name, xs in results.items()}
        outcomes.append(Outcome(memory, memory.before, memory.after(), accepted, evaluated=True))
    return all(check.violation(outcomes) is None for check in plan.checks)


def shrunk(
    case: Case, finding: Finding, search: Search, seconds: float, fair: Fair
) -> tuple[Case, Finding]:
    """The smallest case that `search` still finds a violation in, and that violation.

    Args:
        case: fails.
        finding: its violation.
        search: judges a case.
        seconds: stop after so long; the best so far is returned.
        fair: whether the reference keeps the law on a case.
    """
    best = _Best(case, finding, search, fair, time.perf_counter() + seconds)
    _fewer_tensors(best)
    _fewer_elements(best)
    _plain_placement(best)
    _simple_controls(best)
    _simple_elements(best)
    return best.case, best.finding


def _rows(case: Case) -> list[str]:
    """Lists that have one tensor for each position."""
    single = {argument.name for argument in case.operation.lists if argument.single}
    return [name for name, tensors in case.alike.items() if name not in single and tensors]


def _only(case: Case, kept: Sequence[int]) -> Case:
    return case.taken(kept)


def _length(case: Case) -> int:
    return max((len(case.lists[name]) for name in _rows(case)), default=0)


def _fewer_tensors(best: _Best) -> None:
    index, rows = best.finding.index, _rows(best.case)
    # Another call of the law may have more tensors than the case: split ones.
    there = best.finding.name in rows and all(index < len(best.case.lists[n]) for n in rows)
    if there and best.try_(_only(best.case, [index])):
        return
    for kept in ([], *([i] for i in range(min(_length(best.case), 8)))):
        if _length(best.case) > 1 and best.try_(_only(best.case, kept)):
            return
    size = _length(best.case) // 2
    while size:
        start = 0
        while start < _length(best.case) and _length(best.case) > 1:
            kept = [i for i in range(_length(best.case)) if not start <= i < start + size]
            if not best.try_(_only(best.case, kept)):
                start += size
        size //= 2


def _cut(case: Case, index: int, kept: slice) -> Case:
    """Keep a range of elements of the tensors at one position."""

    def part(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [
            tensor.reshape(-1)[kept].clone() if at == index and not is_counter(tensor) else tensor
            for at, tensor in enumerate(tensors)
        ]

    rows = _rows(case)
    lists = {name: part(ts) if name in rows else ts for name, ts in case.lists.items()}
    return case.with_lists(lists)


def one_less(case: Case) -> Case | None:
    """The case whose longest tensors are one element shorter; None where all are empty."""
    names = _rows(case)
    sizes = [max(case.lists[name][at].numel() for name in names) for at in range(_length(case))]
    longest = sizes.index(max(sizes)) if sizes else 0
    return _cut(case, longest, slice(None, -1)) if any(sizes) else None


def _fewer_elements(best: _Best) -> None:
    for index in range(min(_length(best.case), FEW)):
        name = next((name for name in _rows(best.case)), "")
        place = best.finding.place if best.finding.index == index else 0
        if place >= 0 and best.try_(_cut(best.case, index, slice(place, place + 1))):
            continue
        _bisect(best, name, index)


def _bisect(best: _Best, name: str, index: int) -> None:
    """Cut pieces off both ends, large ones first."""
    size = best.case.lists[name][index].numel() // 2
    while size:
        for cut in (slice(size, None), slice(None, -size)):
            while best.case.lists[name][index].numel() > size:
                if not best.try_(_cut(best.case, index, cut)):
                    break
        size //= 2


def _plain_placement(best: _Best) -> None:
    flat = {name: [0] * len(skews) for name, skews in best.case.skews.items()}
    if any(any(skews) for skews in best.case.skews.values()):
        best.try_(replace(best.case, skews=flat))
    shaped = {
        name: [t if is_counter(t) else t.reshape(-1) for t in tensors]
        for name, tensors in best.case.lists.items()
    }
    shapes = [t for tensors in best.case.lists.values() for t in tensors if not is_counter(t)]
    if any(t.dim() != 1 for t in shapes):
        best.try_(best.case.with_lists(shaped))


def _simple_controls(best: _Best) -> None:
    for option in best.case.operation.options:
        if best.case.options.get(option.name) != option.choices[0]:
            options = {**best.case.options, option.name: option.choices[0]}
            best.try_(replace(best.case, options=options))
    for row in best.case.operation.controls:
        name, known = row.name, [v for v in row.values if math.isfinite(v)]
        value = float(best.case.controls[name].item())
        for simple in SIMPLE[:2]:
            # Outside of what the operation declares, a kernel may refuse.
            if not min(known) <= simple <= max(known):
                continue
            if value == simple or best.try_(best.case.with_controls(**{name: simple})):
                break


def _simple_elements(best: _Best) -> None:
    for name in list(best.case.lists):
        for index in range(min(len(best.case.lists[name]), FEW)):
            for place in range(min(best.case.lists[name][index].numel(), FEW)):
                for candidate in _simpler(best.case, name, index, place):
                    if best.try_(candidate):
                        break


def _simpler(case: Case, name: str, index: int, place: int) -> Iterator[Case]:
    """The case with one element replaced by simpler numbers, simplest first."""
    tensor = case.lists[name][index]
    old = float(tensor.reshape(-1)[place].item())
    candidates = list(SIMPLE)
    if tensor.is_floating_point() and old == old and abs(old) not in (0.0, float("inf")):
        magnitude = torch.tensor(abs(old), dtype=torch.float64)
        power = float(torch.exp2(torch.floor(torch.log2(magnitude))))
        candidates += [power, -power, round(old / power * 8) * power / 8, float(f"{old:.2g}")]
    for value in candidates:
        if value == old:
            return
        new = tensor.clone()
        new.reshape(-1)[place] = torch.tensor(value, dtype=torch.float64).to(tensor.dtype)
        tensors = list(case.lists[name])
        tensors[index] = new
        yield case.with_lists({**case.lists, name: tensors})
