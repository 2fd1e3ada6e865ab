"""Streams and events of the modelled GPU: work is done when it is given, and its order is noted."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from time import perf_counter

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from twinstep.replay.checks.streams import ORDER, READ, STREAM, WRITE, Clock, Order, Touched
from twinstep.replay.launch.options import OPTIONS, reachable
from twinstep.replay.machine.memory import span
from twinstep.replay.triton.device import checked

_NUMBERS = count(1)
_IN_PLACE = re.compile(r"__i[a-z]+__|__setitem__|.*[a-z0-9]_")
# In place, and no work: flags and shapes.
_NO_WORK = frozenset(
    (
        *("requires_grad_", "detach_", "share_memory_", "set_", "as_strided_", "t_", "rename_"),
        *("squeeze_", "unsqueeze_", "transpose_", "swapaxes_", "swapdims_", "resize_"),
    )
)
_READS = frozenset(
    (
        *(
            "item",
            "tolist",
            "numpy",
            "__array__",
            "equal",
            "allclose",
            "is_nonzero",
            "__contains__",
        ),
        *("__bool__", "__float__", "__int__", "__index__", "__complex__", "__repr__", "__format__"),
        *("nonzero", "masked_select", "unique", "unique_consecutive", "argwhere"),
    )
)
"""Functions that wait until the host knows a value, or how many there are."""
Tensors = Sequence[Tensor]


class Stream(torch.Stream):
    """A stream whose work is done when it has been given (see `checks.streams` for its order).

    Of torch's class, as `Tensor.record_stream` takes nothing else.
    """

    priority = 0

    def __new__(cls, device: object = None, priority: int = 0, **_: object) -> Stream:
        """A new stream of the device.

        Raises:
            ValueError: the device is no GPU.
        """
        checked(device)
        return cls.numbered(next(_NUMBERS))

    @classmethod
    def numbered(cls, number: int) -> Stream:
        """The stream of that number; 0 is the first one."""
        return super().__new__(cls, stream_id=number, device_index=0, device_type=1)

    @property
    def cuda_stream(self) -> int:
        """Its number."""
        return int(self.stream_id)

    def __enter__(self) -> Stream:
        """Make it the current one."""
        self._before = STREAM.get()
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Make the one before current again."""
        STREAM.set(self._before)

    def query(self) -> bool:
        """True: there is nothing to wait for."""
        return _host_waits(self._clock)

    def synchronize(self) -> None:
        """Let the host wait for it."""
        _told()
        _host_waits(self._clock)

    def _clock(self, order: Order) -> Clock:
        return order.of(self.cuda_stream)

    def is_capturing(self) -> bool:
        """False: graphs are not modelled."""
        return False

    def wait_event(self, event: Event) -> None:  # type: ignore[override]
        """Wait for an event, on the device."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:  # type: ignore[override]
        """Wait for the work that the other one has now, on the device."""
        if order := ORDER.get():
            order.wait(self.cuda_stream, order.of(int(stream.stream_id)))

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]
        """The event, or a new one, that has happened now."""
        event = event or Event()
        event.record(self)
        return event


class Event:
    """An event of a stream; the time is the host's."""

    def __init__(self, enable_timing: bool = False, **_: object) -> None:
        self._at = 0.0
        self._recorded: tuple[int, Clock] = -1, Counter()
        self.enable_timing = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        """Let it happen after the work that the stream, or the current one, has now."""
        self._at = perf_counter()
        if order := ORDER.get():
            self._recorded = order.number, Counter(order.of(_number(stream)))

    def query(self) -> bool:
        """True: there is nothing to wait for."""
        return _host_waits(self._clock)

    def synchronize(self) -> None:
        """Let the host wait for it."""
        _told()
        _host_waits(self._clock)

    def _clock(self, order: Order) -> Clock:
        number, clock = self._recorded
        return clock if number == order.number else Counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Let the stream, or the current one, wait for it, on the device."""
        if order := ORDER.get():
            order.wait(_number(stream), self._clock(order))

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds of the host's time between two events."""
        return 1000.0 * (end._at - self._at)


def _host_waits(clock: Callable[[Order], Clock]) -> bool:
    if order := ORDER.get():
        order.host_waits(clock(order))
    return True


def _number(stream: Stream | None) -> int:
    return STREAM.get() if stream is None else int(stream.stream_id)


def current_stream(device: object = None) -> Stream:
    """The current stream of this thread."""
    checked(device)
    return Stream.numbered(STREAM.get())


def default_stream(device: object = None) -> Stream:
    """The first stream."""
    checked(device)
    return Stream.numbered(0)


def set_stream(stream: Stream) -> None:
    """Make it the current one."""
    STREAM.set(_number(stream))


@contextlib.contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """Make a stream the current one inside the context."""
    token = STREAM.set(_number(stream))
    try:
        yield
    finally:
        STREAM.reset(token)


def synchronize(device: object = None) -> None:
    """Let the host wait for all work; modes of torch functions see it, as they see reads."""
    _told(device)
    checked(device)
    if order := ORDER.get():
        order.host_waits()


def _told(device: object = None) -> None:
    if torch._C._is_torch_function_mode_enabled():
        handle_torch_function(synchronize, (), device)


@contextlib.contextmanager
def ordered() -> Iterator[None]:
    """Check the order of streams inside the context, if `options(check_races=True)` says so.

    The caller goes on with its own tensors afterwards, those that `allow` names.

    Raises:
        Race: see `checks.streams`.
    """
    stream = STREAM.set(STREAM.get())
    order = Order(STREAM.get(), _given()) if OPTIONS.get().check_races else None
    token = ORDER.set(order)
    try:
        yield
        if order is not None:
            order.end(STREAM.get())
    finally:
        ORDER.reset(token)
        STREAM.reset(stream)


def _given() -> Iterable[Touched]:
    with torch._C.DisableTorchFunction():
        pairs = [pair for known in reachable() for pair in known.measured()[0]]
        return [_touched(label, tensor, WRITE) for label, tensor in pairs]


def _touched(label: str, tensor: Tensor, how: int) -> Touched:
    start = tensor.data_ptr()
    return Touched(start, start + span(tensor), label, how, tensor)


def note(
    func: Callable[..., object],
    target: Tensors,
    sources: Tensors,
    result: Tensors,
    out: Tensors,
) -> None:
    """Note a call of torch as work of the current stream, where the order is checked.

    Args:
        func: The function.
        target: Tensors of the device in its first argument, which it changes if it works in place.
        sources: All tensors of the device that it was given.
        result: Tensors of the device that it returned.
        out: Tensors of the device that it was told to write to.
    """
    order = ORDER.get()
    name, stream = getattr(func, "__name__", "a function"), STREAM.get()
    if order is None or not (sources or result) or name in _NO_WORK:
        return
    inside = {tensor.untyped_storage().data_ptr() for tensor in sources}
    fresh = [one for one in result if one.untyped_storage().data_ptr() not in inside]
    changed = out or (target if _IN_PLACE.fullmatch(name) else fresh)
    if changed:
        read = [one for one in sources if all(one is not other for other in changed)]
        touched = [_touched("", one, WRITE) for one in changed]
        order.work(f"torch's {name}", stream, touched + [_touched("", one, READ) for one in read])
    to_host = name in ("cpu", "to", "copy_") and not (result or changed)
    chosen = name == "__getitem__" and any(one.dtype == torch.bool for one in sources[1:])
    if sources and (name in _READS or to_host or chosen):
        order.host_waits(order.of(stream))
