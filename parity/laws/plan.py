"""A law applied to a case: calls to make, and checks on what they left behind.

Laws are data, so that the judge and the stand-alone repro file carry out the same thing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from twinstep.parity.cases.case import is_counter
from twinstep.parity.cases.formats import widened
from twinstep.parity.cases.guarded_memory import Span
from twinstep.parity.expected.accepted import Accepted, joined
from twinstep.parity.expected.ulp import same
from twinstep.parity.laws.call import Call, Outcome
from twinstep.parity.laws.finding import Finding, element, inputs_at

# What may be written, what is accepted there, and the elements that are wrong.
Row = tuple[Span, Accepted, Tensor]


@dataclass(frozen=True, kw_only=True)
class Values:
    """Everything written agrees with the reference."""

    call: int = 0

    def violation(self, outcomes: Sequence[Outcome]) -> Finding | None:
        """The largest disagreement, if any."""
        outcome = outcomes[self.call]
        rows = [] if outcome.refused else [(s, a, outcome.got(s)) for s, a in outcome.written()]
        if all(bool(whole.accepts(got).all()) for whole, got in joined([row[1:] for row in rows])):
            return None
        wrong = ((span, accepted, ~accepted.accepts(got)) for span, accepted, got in rows)
        return _largest("value", "differs from the reference", self.call, outcome, wrong)


@dataclass(frozen=True, kw_only=True)
class Untouched:
    """Nothing is written but what the operation says: guards, gaps, read-only inputs."""

    call: int = 0

    def violation(self, outcomes: Sequence[Outcome]) -> Finding | None:
        """The first byte that changed and should not have."""
        outcome = outcomes[self.call]
        changed = outcome.after != outcome.before
        writes = outcome.memory.case.operation.writes
        for span in outcome.memory.spans:
            if span.name in writes:
                span.bytes_of(changed)[...] = False
        places = changed.nonzero()
        if not places.numel():
            return None
        return _stray(int(places[0].item()), self.call, outcome)


@dataclass(frozen=True, kw_only=True)
class Unchanged:
    """These arguments keep every bit, NaN payloads too.

    Attributes:
        names: of the arguments.
    """

    names: tuple[str, ...]
    call: int = 0

    def violation(self, outcomes: Sequence[Outcome]) -> Finding | None:
        """The element that changed most."""
        outcome = outcomes[self.call]
        rows = (
            (span, Accepted(value=span.value), self._changed(span, outcome))
            for span in outcome.memory.spans
            if span.name in self.names
        )
        says = "changed although the step is skipped"
        return _largest("skipped step", says, self.call, outcome, rows)

    @staticmethod
    def _changed(span: Span, outcome: Outcome) -> Tensor:
        return span.bytes_of(outcome.after != outcome.before).any(-1)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A range of elements of one list position."""

    index: int
    start: int
    step: int = 1


@dataclass(frozen=True, kw_only=True)
class Same:
    """Two calls leave the same bits in corresponding places.

    Attributes:
        says: what did not matter, for the message.
        first: a call.
        second: the call compared with it.
        where: for every list position of the first call, where its elements lie in the second;
            None: in the same place.
        names: of the arguments compared; None: everything written.
        negated: arguments that the second call leaves with the other sign; a zero has none.
        powers: arguments that the second call leaves times this power of two.
    """

    says: str
    first: int = 0
    second: int = 1
    where: tuple[Piece, ...] | None = None
    names: tuple[str, ...] | None = None
    negated: tuple[str, ...] = ()
    powers: tuple[tuple[str, int], ...] = ()

    def violation(self, outcomes: Sequence[Outcome]) -> Finding | None:
        """The place where the second call differs most."""
        one, two = outcomes[self.first], outcomes[self.second]
        if one.refused or two.refused:
            return None
        return _largest("dependence", self.says, self.second, two, self._rows(one, two))

    def _rows(self, one: Outcome, two: Outcome) -> Iterator[Row]:
        there = {(span.name, span.index): span for span in two.memory.spans}
        for span, _ in one.written():
            if self.names is not None and span.name not in self.names:
                continue
            piece = self.piece(span)
            other = there.get((span.name, piece.index))
            if other is None:
                continue
            want = self.expected(span.name, one.got(span).reshape(-1))
            flat = two.got(other).reshape(-1)
            places = piece.start + piece.step * torch.arange(want.numel())
            right = same(flat[places], want)
            if span.name in self.negated:
                right |= (flat[places] == 0) & (want == 0)
            wrong = torch.zeros(flat.numel(), dtype=torch.bool).index_fill(0, places[~right], True)
            value = flat.clone()
            value[places] = want  # index_copy has no 8-bit floats
            yield other, Accepted(value=value), wrong

    def expected(self, name: str, first: Tensor) -> Tensor:
        """The values of the second call that correspond to these of the first."""
        if name in self.negated:
            return (-widened(first)).to(first.dtype)
        power = dict(self.powers).get(name, 0)
        return first if power == 0 else (first.double() * 2.0**power).to(first.dtype)

    def piece(self, span: Span) -> Piece:
        """Place in the second call of the elements of a span of the first."""
        if span.control or self.where is None:
            return Piece(index=span.index, start=0)
        piece = self.where[span.index]
        if is_counter(span.value):
            # A step count: one per tensor, wherever its elements went.
            return Piece(index=piece.index, start=0)
        return piece


@dataclass(frozen=True, kw_only=True)
class NoHostRead:
    """The host does not read what only the device knows."""

    call: int = 0

    def violation(self, outcomes: Sequence[Outcome]) -> Finding | None:
        """The first read."""
        reads = outcomes[self.call].reads
        if not reads:
            return None
        more = f" and {len(reads) - 1} more" if len(reads) > 1 else ""
        says = f"the host waits for a device value: {reads[0]}{more}"
        return Finding(says=says, call=self.call, kind="host read")


@dataclass(frozen=True, kw_only=True)
class Leaves:
    """Every call leaves the process as it was, and the last ones leave nothing behind.

    Attributes:
        settled: calls in which a cache may fill.
    """

    settled: int = 3

    def violation(self, outcomes: Sequence[Outcome]) -> Finding | None:
        """The first change, or what grows with every call."""
        for call, outcome in enumerate(outcomes):
            if outcome.changed:
                says = f"the kernel {outcome.changed[0]}"
                return Finding(says=says, call=call, kind="process state")
        last = [outcome.keeps for outcome in outcomes[self.settled - 1 :]]
        for name in last[0] if last else ():
            more = [after[name] - before[name] for before, after in pairwise(last)]
            if min(more) > 0:
                says = f"the kernel leaves {more[-1]} {name} more behind with every call"
                return Finding(says=says, call=len(outcomes) - 1, kind="process state")
        return None


@dataclass(frozen=True, kw_only=True)
class Formula:
    """The kernel's formula in float64 is the specification in float64, within what it claims."""

    call: int = 0

    def violation(self, outcomes: Sequence[Outcome]) -> Finding | None:
        """The element that is furthest off, if any."""
        outcome = outcomes[self.call]
        differ: dict[str, tuple[int, int]] = {}
        found: Finding | None = None
        for row in outcome.formulas:
            wrong = row.wrong().reshape(-1)
            counted = differ.get(row.span.name, (0, 0))
            differ[row.span.name] = counted[0] + int(wrong.sum()), counted[1] + wrong.numel()
            if not bool(wrong.any()):
                continue
            room, exact = row.room().reshape(-1), row.truth.exact.reshape(-1)
            value = row.wide.value.reshape(-1)
            ratio = ((value - exact).abs() / room.clamp_min(5e-324)).nan_to_num(nan=torch.inf)
            place = int(torch.where(wrong, ratio, -torch.ones_like(ratio)).argmax().item())
            if found is not None and float(ratio[place]) <= found.ratio:
                continue
            found = Finding(
                says="has another formula: without any rounding it differs from the specification",
                call=self.call,
                kind="formula",
                name=row.span.name,
                index=row.span.index,
                place=-1 if row.span.control else place,
                got=element(value, place),
                want=element(exact, place),
                low=element(exact - room, place),
                high=element(exact + room, place),
                ratio=float(ratio[place].item()),
                inputs=inputs_at(outcome.memory, row.span, place),
                case=outcome.memory.case,
                written=outcome.results(),
            )
        return None if found is None else replace(found, differ=differ)


Check = Values | Untouched | Unchanged | Same | NoHostRead | Leaves | Formula


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The calls and checks of a law on one case.

    Attributes:
        calls: made one after the other.
        checks: what must hold afterwards.
        notes: what is worth a note if it does not hold, but breaks no law.
    """

    calls: tuple[Call, ...]
    checks: tuple[Check, ...]
    notes: tuple[Check, ...] = ()


def _largest(
    kind: str, says: str, call: int, outcome: Outcome, rows: Iterable[Row]
) -> Finding | None:
    """The wrong element that is furthest off, with how many are wrong; None if none is."""
    differ: dict[str, tuple[int, int]] = {}
    found: tuple[float, Span, int, Accepted] | None = None
    for span, accepted, mask in rows:
        wrong = mask.reshape(-1)
        counted = differ.get(span.name, (0, 0))
        differ[span.name] = counted[0] + int(wrong.sum()), counted[1] + wrong.numel()
        if bool(wrong.any()):
            sizes = torch.where(wrong, accepted.errors(outcome.got(span)), -1.0)
            place = int(sizes.argmax().item())
            if found is None or float(sizes[place]) > found[0]:
                found = float(sizes[place]), span, place, accepted
    if found is None:
        return None
    return replace(_finding(kind, says, call, outcome, *found[1:]), differ=differ)


def _finding(
    kind: str, says: str, call: int, outcome: Outcome, span: Span, place: int, accepted: Accepted
) -> Finding:
    got = outcome.got(span)
    ratio = accepted.ratio(got) if accepted.bound is not None else None
    return Finding(
        says=says,
        call=call,
        kind=kind,
        name=span.name,
        index=span.index,
        place=-1 if span.control else place,
        got=element(got, place),
        want=element(accepted.value, place),
        low=None if accepted.low is None else element(accepted.low, place),
        high=None if accepted.high is None else element(accepted.high, place),
        ratio=0.0 if ratio is None else float(ratio.reshape(-1)[place].item()),
        inputs=inputs_at(outcome.memory, span, place),
        case=outcome.memory.case,
        written=outcome.results(),
    )


def _stray(byte: int, call: int, outcome: Outcome) -> Finding:
    """Describe a byte that should not have changed by the tensor it belongs to or follows."""
    spans = sorted(outcome.memory.spans, key=lambda span: span.start)
    for span in spans:
        inside = span.bytes_of(torch.arange(len(outcome.before))) == byte
        if bool(inside.any()):
            place = int(inside.any(-1).reshape(-1).nonzero()[0].item())
            says = "is read-only and was written"
            accepted = Accepted(value=span.value)
            return _finding("stray write", says, call, outcome, span, place, accepted)
    near = [spans[0], *(span for span in spans if span.start <= byte)][-1]
    where = f"{near.side_of(byte)} of {near.name}[{near.index}]"
    return Finding(
        says=f"memory outside every tensor was written: {where}",
        call=call,
        kind="stray write",
        name=near.name,
        index=near.index,
        got=outcome.after[byte].to(torch.int64),
        want=outcome.before[byte].to(torch.int64),
        case=outcome.memory.case,
    )
