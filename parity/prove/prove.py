"""The proof of one kernel in one situation: paths, expressions, words.

A call is traced on names (`trace`). Each condition on data that decided something has another side:
values are sought that take it (`search`), and the call is traced again, until every side of every
condition has been followed. On each path every written element must have the expression that the
reference has.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from twinstep.parity.cases.case import Case
from twinstep.parity.expected.instruction_error import InstructionError
from twinstep.parity.expected.outputs import accepted_outputs
from twinstep.parity.laws.call import Call
from twinstep.parity.operations.operation import Role
from twinstep.parity.prove.beyond import Beyond, control_values
from twinstep.parity.prove.host_numbers import BY_ZERO
from twinstep.parity.prove.search import NOWHERE, satisfying, telling
from twinstep.parity.prove.trace import (
    Leaf,
    Output,
    Trace,
    Tracer,
    kept_values,
    same,
    with_values,
)
from twinstep.parity.records.proof import (
    NOT_PROVED,
    OUT_OF_TIME,
    PROVED,
    REFUTED,
    UNSUPPORTED,
    Verdict,
    listed,
)
from twinstep.parity.runner.calls.local import LocalCaller
from twinstep.replay.dtypes import Array
from twinstep.replay.errors import CannotReplay
from twinstep.replay.names import assume
from twinstep.replay.names.evaluate import evaluate, leaves_of
from twinstep.replay.names.formula import side_by_side, text
from twinstep.replay.names.session import NotNamed

PATHS = 64
"""Most paths that are followed."""
LOOKED_AT = 6
"""Most pairs of different expressions for which a witness is sought."""
FORMAT = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
}
UNKNOWN_SUM = "a sum of squares by integers is none of the reference's: of other elements, or bits"
SHOWN = 16
"""Most values of a witness that are printed."""
FLAGS = (0, 0x3F80_0000)
"""Bits of the values of a flag."""
INFINITY = {"f32": 0x7F80_0000, "f64": 0x7FF0_0000_0000_0000}
Path = tuple[tuple[int, bool], ...]


class _OutOfTimeError(Exception):
    """The seconds of a situation are over."""


@dataclass
class _Found:
    """A word that ends the proof before its paths do."""

    word: str
    detail: str


@dataclass
class Prover:
    """Proves one kernel in one situation.

    Attributes:
        tracer: makes its calls.
        cases: of first calls; sizes, layout, options and counters stay as they are.
        seconds: after which it stops.
        arithmetic: what the kernel claims; a `bounded` one is refuted only by values that its bound
            excludes, at controls of the declared ranges.
    """

    tracer: Tracer
    cases: Sequence[Case]
    seconds: float = 60.0
    arithmetic: str = "exact"
    elements: int = 0
    deadline: float = 0.0
    paths: int = 0
    done: list[Path] = field(default_factory=list)
    assumed: dict[str, None] = field(default_factory=dict)
    beyond: Beyond | None = None
    measured: tuple[Case, InstructionError] | None = None

    def prove(self) -> Verdict:
        """Follow every path of every case and compare every written element on it."""
        started, found = time.process_time(), _Found(PROVED, "")
        self.deadline = started + self.seconds
        try:
            for case in self.cases:
                found = self._paths(case)
                if found.word != PROVED:
                    break
        except _OutOfTimeError:
            found = _Found(OUT_OF_TIME, f"after {self.paths} paths")
        except (NotNamed, CannotReplay) as error:
            found = _Found(UNSUPPORTED, str(error))
        except Exception as error:
            lines = str(error).splitlines() or [""]
            found = _Found(UNSUPPORTED, f"the call raises {type(error).__name__}: {lines[0]}")
        return Verdict(
            found.word,
            found.detail,
            self.elements,
            self.paths,
            tuple(self.assumed),
            kept_values(self.cases),
            time.process_time() - started,
        )

    def _in_time(self) -> None:
        if time.process_time() > self.deadline:
            raise _OutOfTimeError

    def _paths(self, first: Case) -> _Found:
        queue, self.done = [first], []
        sides: set[Path] = set()
        doubt: _Found | None = None
        while queue:
            self._in_time()
            if len(self.done) >= PATHS:
                return _Found(NOT_PROVED, f"more than {PATHS} paths")
            case = queue.pop()
            trace = self.tracer.trace(case)
            self.assumed |= dict.fromkeys(trace.assumed)
            path = tuple((number, outcome) for number, outcome, _ in trace.decided)
            if path in self.done:
                continue
            self.done.append(path)
            self.paths += 1
            found = self._run(case, trace)
            if found is None and trace.foreign:
                return _Found(UNSUPPORTED, f"numbers that the host has computed: {trace.foreign}")
            contract = self._contract()
            found = found or self._compared(case, trace, (*contract, *path))
            if found is not None and found.word == REFUTED:
                return found
            doubt = doubt or found
            for at, (number, outcome, place) in enumerate(trace.decided):
                self._in_time()
                side = (*path[:at], (number, not outcome))
                followed = side in sides or any(p[: at + 1] == side for p in self.done)
                if followed or place == BY_ZERO:
                    continue
                sides.add(side)
                table, held = self.tracer.table, (*contract, *side)
                if self._impossible(held):
                    continue
                bits = satisfying(table, held, self._bits(case), self._bits(first))
                if bits is None:
                    condition = text(table, number, 5)
                    word = "false" if outcome else "true"
                    doubt = doubt or _Found(
                        NOT_PROVED, f"a branch was not followed: {condition} {word}, at {place}"
                    )
                else:
                    queue.append(with_values(case, self._by_leaf(bits)))
        return doubt or _Found(PROVED, "")

    def _contract(self) -> Path:
        """What the contract says: flags are 0 or 1, most numbers finite, many not negative."""
        table, found = self.tracer.table, []
        for control in self.cases[0].operation.controls:
            number = self.tracer.leaves.get((control.name, 0, 0))
            kind = FORMAT.get(control.dtype)
            if number is None or kind is None or control.output:
                continue
            if control.decision:
                equal = [table.row("eq.f32", (number, table.const(b, 2)), 0) for b in FLAGS]
                found.append((table.row("or", equal, 0), True))
            elif control.finite:
                g = table.rows[number].granules
                held = table.row(f"abs.{kind}", (number,), g) if control.signed else number
                # As unsigned bits, whatever is negative is above infinity.
                word = f"lt.{kind if control.signed else kind.replace('f', 'u')}"
                found.append((table.row(word, (held, table.const(INFINITY[kind], g)), 0), True))
        return tuple(found)

    def _impossible(self, conditions: Path) -> bool:
        """True if the last condition contradicts another, or holds at no value of the flags."""
        table, (last, outcome) = self.tracer.table, conditions[-1]
        if (last, not outcome) in conditions:
            return True
        controls = self.cases[0].operation.controls
        names = [(control.name, 0, 0) for control in controls if control.decision]
        flags = [self.tracer.leaves[name] for name in names if name in self.tracer.leaves]
        inside = [(n, o) for n, o in conditions if set(flags).issuperset(leaves_of(table, [n]))]
        if not flags or conditions[-1] not in inside:
            return False
        columns = np.meshgrid(*[np.array(FLAGS, np.uint32)] * len(flags))
        bits = {leaf: c.reshape(1, -1) for leaf, c in zip(flags, columns, strict=True)}
        values = evaluate(table, [number for number, _ in inside], bits)
        held = np.broadcast_arrays(*(values[n] == o for n, o in inside))
        return not np.logical_and.reduce(held).any()

    def _run(self, case: Case, trace: Trace) -> _Found | None:
        """A refutation by the values of the run itself."""
        for output in trace.outputs:
            wrong = self._wrong(case, output)
            if wrong.any():
                return _Found(REFUTED, self._shown(case, output, int(np.argmax(wrong))))
        return None

    def _wrong(self, case: Case, output: Output) -> Array:
        """Mask of the elements whose values in a run break the claim of the kernel."""
        wrong = ~same(output.got, output.expected)
        if wrong.any() and not _allowed(case, self.arithmetic):
            return np.zeros_like(wrong)
        if self.arithmetic == "exact" or not wrong.any():
            return wrong
        error = self._instruction_error(case)
        accepted = accepted_outputs(case, self.arithmetic, error)[output.name][output.index]
        right = accepted.accepts(output.got.detach().reshape(accepted.value.shape))
        return np.asarray(wrong & ~right.reshape(-1).numpy())

    def _instruction_error(self, case: Case) -> InstructionError:
        """What the instructions of a call add to its bounds, measured as the laws measure it."""
        if self.measured is None or self.measured[0] is not case:
            caller = LocalCaller(self.tracer.function, self.tracer.engine)
            self.measured = case, caller.make(Call(case=case), None).error
        return self.measured[1]

    def _compared(self, case: Case, trace: Trace, path: Path) -> _Found | None:
        """The word for one path, if it is not a proof."""
        here = assume.Path(self.tracer.table, path)
        pairs = list(self._different(trace, here))
        for output, at in pairs[:LOOKED_AT]:
            self._in_time()
            if self._of_unknown_sum(*self._pair(output, at)):
                continue
            found = self._witness(case, output, at, path)
            if found is not None:
                return found
        found = self._beyond(case, trace, path, here) if pairs else None
        if found is not None:
            return found
        self.elements += sum(len(output.kernel) for output in trace.outputs)
        return None

    def _beyond(self, case: Case, trace: Trace, path: Path, here: assume.Path) -> _Found | None:
        """The word for expressions of different names, if they are not proved equal after all."""
        table = self.tracer.table
        beyond = self.beyond = self.beyond or Beyond(table, self.arithmetic)
        bits, doubt, tried = self._bits(case), None, 0
        for output in trace.outputs:
            kind = FORMAT.get(output.got.dtype, "")
            for at in np.flatnonzero(output.kernel != output.reference).tolist():
                self._in_time()
                a, b = map(here.rewritten, self._pair(output, at))
                if a == b:
                    continue
                if self._of_unknown_sum(a, b):
                    if doubt is None:
                        lines = f"{side_by_side(table, a, b)}\n{UNKNOWN_SUM}"
                        doubt = _Found(NOT_PROVED, f"{output.label}[{at}]\n{lines}")
                    continue
                ranges = partial(control_values, case, self.tracer.leaves, table, (a, b))
                opinion = beyond.opinion((a, b), kind, path, bits, ranges)
                if opinion.equal:
                    self.assumed[opinion.words] = None
                    continue
                for values in opinion.witnesses if tried < LOOKED_AT else ():
                    found = self._run_with(case, output, at, values)
                    if found is not None:
                        return found
                tried += 1
                lines = f"{side_by_side(table, a, b)}\n{opinion.words}".strip()
                doubt = doubt or _Found(NOT_PROVED, f"{output.label}[{at}]\n{lines}")
        return doubt

    def _of_unknown_sum(self, *pair: int) -> bool:
        """True if one of two expressions is a mix, which equals nothing and has no value."""
        return any(self.tracer.table.rows[number].op == "mix" for number in pair)

    def _different(self, trace: Trace, here: assume.Path) -> Iterator[tuple[Output, int]]:
        """Elements whose expressions differ: of each output the first and the last first."""
        rest: list[tuple[Output, int]] = []
        for output in trace.outputs:
            places = [
                at
                for at in np.flatnonzero(output.kernel != output.reference).tolist()
                if len(set(map(here.rewritten, self._pair(output, at)))) > 1
            ]
            if places:
                yield output, places[0]
                rest += [(output, at) for at in dict.fromkeys((places[-1], *places[1:3]))]
        yield from rest

    def _pair(self, output: Output, at: int) -> tuple[int, int]:
        """Numbers of both expressions of an element, constants where no leaf enters."""
        found = []
        for numbers, tensor in ((output.kernel, output.got), (output.reference, output.expected)):
            number = int(numbers[at])
            if number < 0:
                size = tensor.element_size()
                flat = tensor.detach().reshape(-1)[at : at + 1].contiguous()
                kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
                own = int(flat.view(kinds.get(size, torch.int64)).item()) % (1 << 8 * size)
                number = self.tracer.table.const(own, max(size // 2, 1))
            found.append(number)
        return found[0], found[1]

    def _witness(self, case: Case, output: Output, at: int, path: Path) -> _Found | None:
        """A refutation by values, confirmed by a run with them."""
        a, b = self._pair(output, at)
        dtype, bits = FORMAT.get(output.got.dtype, ""), self._bits(case)
        inside = control_values(case, self.tracer.leaves, self.tracer.table, (a, b))
        try:
            find = partial(telling, self.tracer.table, a, b, dtype, path, bits)
            found = [find(NOWHERE), find(inside)]
        except CannotReplay:
            return None  # an operation of torch that has no evaluation
        shown = (self._run_with(case, output, at, one.bits) for one in found if one)
        return next(filter(None, shown), None)

    def _run_with(
        self, case: Case, output: Output, at: int, bits: Mapping[int, int]
    ) -> _Found | None:
        """A refutation by other bits of leaves, if a run with them confirms it."""
        moved = with_values(case, self._by_leaf(bits))
        if not _allowed(moved, self.arithmetic):
            return None
        again = self.tracer.trace(moved)
        for one in again.outputs:
            if one.label == output.label and self._wrong(moved, one)[at]:
                return _Found(REFUTED, self._shown(moved, one, at, tuple(bits)))
        return None

    def _shown(
        self, case: Case, output: Output, at: int, leaves: Sequence[int] | None = None
    ) -> str:
        """A witness as text."""
        if leaves is None:
            leaves = leaves_of(self.tracer.table, self._pair(output, at))
        by_number = {number: leaf for leaf, number in self.tracer.leaves.items()}
        words = []
        for number in (n for n in leaves if n in by_number):
            name, index, element = by_number[number]
            tensor = case.controls[name] if name in case.controls else case.lists[name][index]
            words.append(f"{self._leaf(number)}={tensor.reshape(-1)[element].item()!r}")
        if len(words) > SHOWN:
            words[SHOWN:] = [f"{len(words) - SHOWN} more values"]
        words += [f"{name} = {listed(kept)}" for name, kept in kept_values([case]).items()]
        got, expected = (t.reshape(-1)[at].item() for t in (output.got, output.expected))
        return (
            f"{output.label}[{at}] is {got!r}, but should be {expected!r}, "
            f"with {', '.join(words) or 'the values of the case'}"
        )

    def _leaf(self, number: int) -> str:
        return text(self.tracer.table, number)

    def _bits(self, case: Case) -> dict[int, int]:
        """Bits of all leaves in a case."""
        found = {}
        for name, tensors in [*case.lists.items(), *((n, [t]) for n, t in case.controls.items())]:
            for index, tensor in enumerate(tensors):
                if (name, index, 0) in self.tracer.leaves:
                    size = tensor.element_size()
                    view = {2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
                    flat = tensor.detach().contiguous().reshape(-1).view(view).tolist()
                    for element, bits in enumerate(flat):
                        found[self.tracer.leaves[name, index, element]] = bits % (1 << 8 * size)
        return found

    def _by_leaf(self, bits: Mapping[int, int]) -> dict[Leaf, int]:
        by_number = {number: leaf for leaf, number in self.tracer.leaves.items()}
        return {by_number[number]: own for number, own in bits.items() if number in by_number}


def _allowed(case: Case, arithmetic: str) -> bool:
    """True if all values are such that the claim is about: of a bound, the ranges of controls."""
    exact, squares = arithmetic == "exact", case.operation.lists_of(Role.SQUARE)
    return not any((one < 0).any() for name in squares for one in case.lists[name]) and all(
        (row.within if exact else row.bounded)(case.controls[row.name].item())
        for row in case.operation.controls
    )
