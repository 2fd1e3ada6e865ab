"""Order between the streams of a GPU: what each of them, and the host, has waited for.

Work is done when it is given, in the order of the host. Whether a GPU might do it in another order
is known by clocks: a stream that waits for another one, or for an event, takes over all that is
known there to be done; the host, which waits for a stream or reads a value, passes its knowledge on
to all work that it gives afterwards. Two pieces of work on two streams, neither of which is known
to the other, must not touch the same bytes, one of them writing: an error at the second one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count, product

import numpy as np

from twinstep.replay.checks.history import NOBODY, History
from twinstep.replay.dtypes import Array
from twinstep.replay.errors import Race
from twinstep.replay.machine.memory import Regions

Clock = Counter[int]
"""How many pieces of the work of each stream are known to be done."""


READ, WRITE, ATOMIC = 1, 2, 4
_NUMBERS = count()


@dataclass(frozen=True)
class Touched:
    """Bytes that a piece of work touches.

    Attributes:
        start, stop: Addresses.
        label: Of the tensor, if it has a name.
        how: Sum of `READ`, `WRITE` and `ATOMIC`, of all bytes or of each.
        keeper: Keeps the memory, so that nothing else takes its place.
    """

    start: int
    stop: int
    label: str
    how: int | Array
    keeper: object

    def meets(self, other: Touched) -> bool:
        """True if both touch a byte, not both by reading it, and not both by atomics."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        if start >= stop:
            return False
        one, two = self._part(start, stop), other._part(start, stop)
        either = one | two
        return bool(np.any((one != 0) & (two != 0) & (either != READ) & (either != ATOMIC)))

    def _part(self, start: int, stop: int) -> Array:
        if isinstance(self.how, int):
            return np.full(1, self.how, np.uint8)
        return self.how[start - self.start : stop - self.start]


@dataclass(frozen=True)
class _Work:
    """One piece of work: its number among those of its stream, and what it touches."""

    name: str
    stream: int
    number: int
    touched: tuple[Touched, ...]


class Order:
    """The work that a launcher gives to streams while it runs, and who has waited for whom.

    Args:
        stream: The current one of the caller, whose earlier work has made what is `given`.
        given: The caller's tensors. It goes on with them afterwards, see `end`.

    Attributes:
        number: Its own; what an event knows of another one says nothing here.
    """

    def __init__(self, stream: int, given: Iterable[Touched]) -> None:
        self.number = next(_NUMBERS)
        self._caller = stream
        self._given = tuple(given)
        self._known: dict[int, Clock] = {}
        self._host: Clock = Counter()
        self._works: list[_Work] = []
        self.work("the caller's earlier work", stream, self._given)

    def of(self, stream: int) -> Clock:
        """Work that is known to be done by the time that the next one of a stream begins."""
        known = self._known.setdefault(stream, Counter())
        known |= self._host
        return known

    def wait(self, stream: int, clock: Clock) -> None:
        """Let a stream wait until all of that is done."""
        self._known[stream] = self.of(stream) | clock

    def host_waits(self, clock: Clock | None = None) -> None:
        """Let the host wait until that is done; for all work that has been given if None."""
        if clock is None:
            clock = Counter({work.stream: work.number for work in self._works})
        self._host |= clock

    def work(self, name: str, stream: int, touched: Iterable[Touched]) -> None:
        """Give a stream a piece of work.

        Raises:
            Race: another stream's work might be done before or after it, and it matters.
        """
        known = self.of(stream)
        own = _Work(name, stream, known[stream] + 1, tuple(touched))
        for other in self._works:
            if other.stream == stream or other.number <= known[other.stream]:
                continue
            for one, two in product(own.touched, other.touched):
                if one.meets(two):
                    raise Race(
                        f"{_capital(name)} and {other.name} both touch "
                        f"{one.label or two.label or 'a tensor'}, one of them writing, on two "
                        f"streams that do not wait for one another: wait_stream or an event is "
                        f"missing."
                    )
        known[stream] = own.number
        self._works.append(own)

    def end(self, current: int) -> None:
        """The launcher has returned: its caller goes on, on its own stream, with what it gave.

        Args:
            current: the current stream now.

        Raises:
            Race: another stream is current than before, which the caller does not know, or work
                of another one on what it gave need not have been done.
        """
        if current != self._caller:
            raise Race(
                f"The launcher found stream {self._caller} and leaves stream {current} current: "
                f"its caller's later work goes there."
            )
        self.work("the caller's later work", self._caller, self._given)


def _capital(name: str) -> str:
    return name[0].upper() + name[1:]


ORDER: ContextVar[Order | None] = ContextVar("order of streams", default=None)
"""Of the launcher that runs, if its order is checked."""
STREAM: ContextVar[int] = ContextVar("current stream", default=0)
"""Number of the current stream; 0 is the first one."""


def launched(history: History, regions: Regions) -> None:
    """Note what a launch has touched, after it was run.

    Stores of the value that is already there count as none: flags may be raised by all streams.
    """
    order = ORDER.get()
    if order is None:
        return
    touched = []
    for index, trace in history.traces.items():
        region, word = regions.region(index), history.word
        wrote = (trace.write[:, 0] != NOBODY) * np.where(trace.atomic, ATOMIC, WRITE)
        how = np.repeat((wrote | (trace.reads[0][:, 0] != NOBODY) * READ).astype(np.uint8), word)
        first = region.words(word, word)[1]
        touched.append(Touched(first, first + len(how), region.label, how, region.members))
    order.work(f"kernel {history.kernel.name}", STREAM.get(), touched)
