"""Atomics: threads that meet at one address take their turns in thread order.

Any order is allowed on the device; replay's is fixed (row by row, thread by thread), so results
repeat. `atom.add.f32` flushes subnormals in global memory and keeps them in shared memory
(PTX ISA, `atom`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from twinstep.replay.dtypes import NUMPY, Array, stretched
from twinstep.replay.isa.half import half_operation
from twinstep.replay.isa.rounding import flush
from twinstep.replay.machine.access import Site
from twinstep.replay.machine.generic_access import WINDOWS, both_hold, space_of
from twinstep.replay.machine.lanes import ActiveLanes, Checks, Lanes
from twinstep.replay.ptx.syntax import Instruction

Update = Callable[..., Array]

_UFUNCS: dict[str, np.ufunc] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
MANY = 16
"""Above this many turns at one address, running totals replace turn-by-turn updates."""

_LOCK = threading.Lock()
"""Held while global memory is read, changed and written: other threads launch kernels meanwhile."""


def _compare_and_swap(old: Array, expected: Array, new: Array) -> Array:
    return np.where(old == expected, new, old)


def _increment(old: Array, limit: Array) -> Array:
    return np.asarray(np.where(old >= limit, old.dtype.type(0), old + old.dtype.type(1)))


def _decrement(old: Array, limit: Array) -> Array:
    return np.where((old == 0) | (old > limit), limit, old - old.dtype.type(1))


_SPECIAL: dict[str, Update] = {
    "exch": lambda old, new: new,
    "cas": _compare_and_swap,
    "inc": _increment,
    "dec": _decrement,
}


def update_of(operation: str, kind: str, space: str) -> Update:
    """old, arguments → new, on arrays in the NumPy type of `kind`."""
    if operation in _SPECIAL:
        return _SPECIAL[operation]
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        return half_operation((operation, "rn" if operation == "add" else "noftz", kind)).function  # type: ignore[return-value]
    function: Update = _UFUNCS[operation]
    if kind == "f32" and space == "global":
        return lambda old, value: flush(function(flush(old), flush(value)))
    return function


class AtomicSite:
    """One `atom` or `red` instruction.

    Args:
        operation: add, min, max, and, or, xor, exch, cas, inc or dec.
        kind: PTX type of one word.
        count: Words per thread; each is atomic on its own.
        returns: Whether old values are wanted.
        exchanged: Type of the floats that a loop of compare-and-swap adds; behind the arguments of
            the swap comes the term then, or its two factors (see `ptx.exchanged`).
    """

    def __init__(
        self,
        instruction: Instruction,
        space: str,
        operation: str,
        kind: str,
        count: int,
        offset: int,
        returns: bool,
        exchanged: str = "",
    ) -> None:
        self.operation = operation
        self.dtype = NUMPY["u16" if kind in ("f16", "bf16") else kind]
        self.count = count
        self.offset = np.uint64(offset % 2**64)
        self.space = space
        size = self.dtype.itemsize
        spaces = (space,) if space else ("global", "shared")
        self.sites = {s: Site(instruction, "atomic", s, size, count, 0) for s in spaces}
        self.updates = {s: update_of(operation, kind, s) for s in spaces}
        simple = operation in _UFUNCS and self.dtype.kind in "iu" and not kind.endswith("x2")
        self.running = simple and kind not in ("f16", "bf16")
        self.running_float = operation == "add" and self.dtype.kind == "f"
        self.exchanged = exchanged
        self.sums = kind.removesuffix("x2") if operation == "add" and "f" in kind else exchanged

    def update(
        self,
        lanes: Lanes,
        address: Array,
        guard: Array | None,
        arguments: tuple[Array, ...],
        old: tuple[Array, ...],
    ) -> tuple[Array, ...]:
        """Apply to memory; returns the values found there (`old` where the guard is false)."""
        address = stretched(address + address.dtype.type(self.offset), lanes.shape)
        if guard is not None:
            taken = np.count_nonzero(guard)
            if not taken:
                return old
            if taken == guard.size:
                guard = None
        if self.space:
            return self._in_space(self.space, lanes, address, guard, arguments, old)
        for name, mask in space_of(address).items():
            own = address - np.uint64(WINDOWS.get(name, 0))
            part = both_hold(guard, mask if not mask.all() else None)
            old = self._in_space(name, lanes, own, part, arguments, old)
        return old

    def _in_space(
        self,
        space: str,
        lanes: Lanes,
        address: Array,
        guard: Array | None,
        arguments: tuple[Array, ...],
        old: tuple[Array, ...],
    ) -> tuple[Array, ...]:
        site = self.sites[space]
        data = [stretched(a, lanes.shape).reshape(-1) for a in arguments]
        if space == "shared":
            words, flat, index = site.private(lanes, address, guard)
            site.note_private(lanes, flat, index)
            chosen = ActiveLanes(lanes, flat, index, lanes.shape)
            out = self._apply(space, words, index, [d[flat] for d in data])
            self._tell(lanes, space, words, index, out, [d[flat] for d in data], slice(None))
            return site.spread(lanes, guard, chosen, out, old)
        chosen = site.select(lanes, address, guard)
        site.note(lanes, chosen)
        out = np.empty((self.count, len(chosen.flat)), site.word)
        for region, part in chosen.regions():
            words, first = region.words(site.size, site.bytes)
            index = (chosen.address[part] - np.uint64(first)).astype(np.int64) // site.size
            own = [d[chosen.flat][part] for d in data]
            with _LOCK:
                out[:, part] = self._apply(space, words, index, own)
                self._tell(lanes, space, words, index, out[:, part], own, part)
        return site.spread(lanes, guard, chosen, out, old)

    def _apply(self, space: str, words: Array, index: Array, data: list[Array]) -> Array:
        """Update words[index] in turn; returns the old values, one row per word."""
        typed = words.view(self.dtype)
        rows = []
        for k in range(self.count):
            own = [d.view(self.dtype) for d in data[k :: self.count]]
            own = own[:2] if self.exchanged else own
            rows.append(self._turns(self.updates[space], typed, index + k, own))
        return np.stack(rows).view(words.dtype)

    def _tell(
        self,
        lanes: Lanes,
        space: str,
        words: Array,
        index: Array,
        old: Array,
        data: list[Array],
        part: Array | slice,
    ) -> None:
        """Let the opt-in checks see the sums of floats that this access has made."""
        checks = lanes.batch.checks
        if checks is None or not self.sums or not len(index):
            return
        if self.exchanged:
            self._tell_exchanged(checks, words, index, old[0], data, part)
            return
        unit = np.dtype(f"u{2 if self.sums.endswith('f16') else self.dtype.itemsize}")
        many = self.dtype.itemsize // unit.itemsize
        for k in range(self.count):
            found, term = old[k].view(self.dtype), data[k].view(self.dtype)
            left = np.asarray(self.updates[space](found, term), self.dtype)
            for half in range(many):
                old_bits, term_bits, left_bits = (
                    v.view(unit)[half::many] for v in (found, term, left)
                )
                turns = (old_bits, term_bits, left_bits)
                place = (index + k) * many + half
                checks.summed(self.sums, words.view(unit), place, turns, part)

    def _tell_exchanged(
        self,
        checks: Checks,
        words: Array,
        index: Array,
        old: Array,
        data: list[Array],
        part: Array | slice,
    ) -> None:
        """The same of swaps, those alone that have found what they expected."""
        expected, new, *factors = (d.view(words.dtype) for d in data)
        done = np.flatnonzero(old == expected)
        if self.exchanged != "bf16":
            floats = [f.view(f"f{words.itemsize}")[done] for f in factors]
            term = np.multiply.reduce(floats).view(words.dtype)
        elif len(factors) == 1:
            term = factors[0][done]
        else:
            return
        turns = (old[done], term, new[done])
        chosen = done if isinstance(part, slice) else part[done]
        checks.summed(self.exchanged, words, index[done], turns, chosen)

    def _turns(self, update: Update, words: Array, index: Array, data: list[Array]) -> Array:
        order = np.argsort(index, kind="stable")
        place = index[order]
        values = [d[order] for d in data]
        new_segment = np.ones(len(place), np.bool_)
        new_segment[1:] = place[1:] != place[:-1]
        starts = np.flatnonzero(new_segment)
        lengths = np.diff(np.append(starts, len(place)))
        old = np.empty(len(place), self.dtype)
        if (lengths > MANY).any() and (self.running or self.running_float):
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
                self._run(update, words, place[start], values[0], start, start + length, old)
        else:
            # Given the same arguments, all later turns leave a word that one turn left as it was.
            alike = all((v[1:] == v[:-1])[~new_segment[1:]].all() for v in values)
            for turn in range(int(lengths.max(initial=0))):
                at = starts[lengths > turn] + turn
                old[at] = words[place[at]]
                words[place[at]] = update(old[at], *(v[at] for v in values))
                if alike and words[place[at]].tobytes() == old[at].tobytes():
                    later = np.arange(len(place)) > np.repeat(starts, lengths) + turn
                    old[later] = words[place[later]]
                    break
        result = np.empty_like(old)
        result[order] = old
        return result

    def _run(
        self,
        update: Update,
        words: Array,
        place: int,
        values: Array,
        start: int,
        end: int,
        old: Array,
    ) -> None:
        """All turns at one address: a running total, which NumPy forms strictly in order."""
        chain = np.concatenate([words[place : place + 1], values[start:end]])
        totals = _UFUNCS[self.operation].accumulate(chain)
        tiny = self.dtype == np.float32 and bool(
            (
                (np.abs(np.concatenate([chain, totals])) < 2.0**-126)
                & (np.concatenate([chain, totals]) != 0)
            ).any()
        )
        if tiny:
            for turn in range(start, end):
                old[turn] = words[place]
                words[place] = update(words[place : place + 1], values[turn : turn + 1])[0]
            return
        old[start:end] = totals[:-1]
        words[place] = totals[-1]
