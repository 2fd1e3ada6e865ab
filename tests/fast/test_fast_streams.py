"""Copies to a GPU are in order on every stream, on a fake device that is as late as it may be."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from twinstep.fast.runtime.lists import FixedTensors, Layout, MovingTensors
from twinstep.fast.runtime.tables import AddressTable, TableCache, tensor_tables
from twinstep.fast.runtime.uploads import StagingRing, Upload
from twinstep.replay import modelled_gpu

GPU = torch.device("cuda", 0)
STREAMS = 3
LATE = -77
"""What memory of the device holds until a copy has been made."""


class Stream:
    """Work in order, done when the test says so."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], bool]] = deque()

    def add(self, action: Callable[[], object]) -> None:
        """Do something at its turn."""
        self.work.append(lambda: (action(), True)[1])

    def wait_event(self, event: Event) -> None:
        """Do nothing further before the event, as it is recorded now."""
        happened = event.happened
        self.work.append(lambda: bool(happened))

    def advance(self) -> bool:
        """Do the next thing, unless it must wait."""
        if not self.work or not self.work[0]():
            return False
        self.work.popleft()
        return True


class Event:
    """A place in the work of a stream."""

    def __init__(self) -> None:
        self.happened: list[bool] = [True]

    def record(self, stream: Stream | None = None) -> None:
        """Happen when the stream has done what it has now."""
        happened: list[bool] = []
        (stream or Device.now.current).add(lambda: happened.append(True))
        self.happened = happened

    def query(self) -> bool:
        """True once it has happened."""
        return bool(self.happened)


class Device(TorchFunctionMode):
    """A GPU whose streams copy late."""

    now: Device

    def __init__(self) -> None:
        super().__init__()
        self.streams = [Stream() for _ in range(STREAMS)]
        self.current = self.streams[0]
        self.capturing = False
        self.kept: list[tuple[int, Stream]] = []
        self.owner: dict[int, Stream] = {}
        self.held: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Put asynchronous copies on the current stream."""
        named = dict(kwargs or {})
        if not named.get("non_blocking"):
            return func(*args, **named)
        assert func in (Tensor.to, Tensor.copy_)
        target, source = args[0], args[1]
        if func is Tensor.to:
            target, source = torch.full_like(args[0], LATE, device=GPU), args[0]
            self.owner[target.data_ptr()] = self.current
            self.held.append(target)
        assert source.is_pinned()
        self.current.add(lambda: target.copy_(source))
        return target

    @property
    def keep(self) -> Callable[[Tensor, Stream], None]:
        """In place of `Tensor.record_stream`."""
        return lambda tensor, stream: self.kept.append((tensor.data_ptr(), stream))

    def finish(self) -> None:
        """Let all streams advance to their end."""
        while any([stream.advance() for stream in self.streams]):
            pass
        assert not any(stream.work for stream in self.streams), "streams wait for each other"


@contextmanager
def late_gpu() -> Iterator[Device]:
    """Replace the modelled GPU's streams by such a device."""
    with pytest.MonkeyPatch.context() as patch, modelled_gpu():
        Device.now = device = Device()
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: Device.now.current)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Device.now.capturing)
        patch.setattr(Tensor, "record_stream", device.keep)
        with device:
            yield device


PLACES = st.integers(0, STREAMS - 1)
USES = st.lists(st.tuples(PLACES, st.integers(0, 3), st.lists(PLACES, max_size=4)), max_size=12)


@settings(max_examples=60)
@given(USES)
def test_a_kernel_on_any_stream_finds_its_table_uploaded(
    uses: list[tuple[int, int, list[int]]],
) -> None:
    with late_gpu() as device:
        cache = TableCache(limit=2)
        tensors = [torch.zeros(n + 1, device=GPU) for n in range(4)]
        seen: list[tuple[list[int], list[int]]] = []

        def read(data: Tensor, wanted: list[int]) -> None:
            seen.append((data.tolist(), wanted))

        for place, which, progress in uses:
            device.current = device.streams[place]
            (table,) = tensor_tables([[tensors[which]]], chunk=8, cache=cache)
            host = table.upload.host.tolist()
            assert host[0] == tensors[which].data_ptr()
            device.current.add(partial(read, table.data, host))
            at = table.data.data_ptr()
            assert device.owner[at] is device.current or (at, device.current) in device.kept
            for stream in progress:
                device.streams[stream].advance()
        device.finish()
        assert len(seen) == len(uses)
        assert all(found == told for found, told in seen)


@settings(max_examples=60)
@given(st.lists(st.tuples(PLACES, st.lists(PLACES, max_size=3)), max_size=12))
def test_a_pinned_slot_is_not_written_before_the_copy_out_of_it(
    sends: list[tuple[int, list[int]]],
) -> None:
    with late_gpu() as device:
        ring, targets = StagingRing(2), []
        for number, (place, progress) in enumerate(sends):
            device.current = device.streams[place]
            targets.append(torch.full((2,), LATE, dtype=torch.int64, device=GPU))
            ring.send([number, -number], targets[-1])
            for stream in progress:
                device.streams[stream].advance()
        device.finish()
        assert [t.tolist() for t in targets] == [[i, -i] for i in range(len(sends))]


def test_a_slot_is_taken_again_once_its_copy_is_made() -> None:
    with late_gpu() as device:
        ring, target = StagingRing(1), torch.zeros(1, dtype=torch.int64, device=GPU)
        for number in range(5):
            ring.send([number], target)
            device.finish()
        assert len(ring._slots) == 1
        for number in range(5):
            ring.send([number], target)
        assert len(ring._slots) == 5


def test_a_stream_waits_for_an_upload_once() -> None:
    with late_gpu() as device:
        upload = Upload(torch.arange(3), GPU)
        upload.order()
        assert len(device.streams[0].work) == 2  # the copy and its event
        device.current = device.streams[1]
        upload.order()
        upload.order()
        assert len(device.streams[1].work) == 1
        assert not device.streams[1].advance()
        assert device.kept == [(upload.data.data_ptr(), device.streams[1])]


def test_what_is_built_while_a_graph_is_captured_is_not_used_outside_of_it() -> None:
    with late_gpu() as device:
        cache, tensors = TableCache(), [torch.zeros(3, device=GPU)]
        device.capturing = True
        (inside,) = tensor_tables([tensors], chunk=8, cache=cache)
        (again,) = tensor_tables([tensors], chunk=8, cache=cache)
        device.capturing = False
        device.streams[0].work.clear()  # a graph runs when it is replayed, not now
        (outside,) = tensor_tables([tensors], chunk=8, cache=cache)
        device.finish()
        assert len({id(table.upload) for table in (inside, again, outside)}) == 3
        assert outside.data.tolist() == outside.upload.host.tolist()
        assert inside.data.tolist() == [LATE] * len(inside.data)


def test_a_captured_kernel_takes_a_table_of_before_and_waits_for_nothing() -> None:
    with late_gpu() as device:
        cache, tensors = TableCache(limit=1), [torch.zeros(3, device=GPU)]
        (before,) = tensor_tables([tensors], chunk=8, cache=cache)
        device.finish()
        device.current, device.capturing = device.streams[1], True
        (inside,) = tensor_tables([tensors], chunk=8, cache=cache)
        assert inside is before
        assert not device.streams[1].work
        device.capturing = False
        tensor_tables([[torch.zeros(5, device=GPU)]], chunk=8, cache=cache)
        assert [before] in cache._captured  # pushed out, but the graph holds its address


@settings(max_examples=60)
@given(USES)
def test_a_kernel_on_any_stream_finds_the_addresses_of_its_own_call(
    uses: list[tuple[int, int, list[int]]],
) -> None:
    """The table is written again while kernels of other streams may still have to read it."""
    with late_gpu() as device:
        cache = TableCache()
        weights = FixedTensors([torch.zeros(3, device=GPU), torch.zeros(5, device=GPU)])
        layout = Layout(weights)
        seen: list[tuple[list[int], list[int]]] = []

        def read(data: Tensor, wanted: list[int]) -> None:
            seen.append((data[2:4].tolist(), wanted))

        for place, which, progress in uses:
            device.current = device.streams[place]
            addresses = [1600 * (which + 1), 3200 * (which + 1)]
            moving = MovingTensors(weights, array("q", addresses), layout)
            (table,) = tensor_tables([weights, moving], chunk=8, cache=cache)
            device.current.add(partial(read, table.data, addresses))
            for stream in progress:
                device.streams[stream].advance()
        device.finish()
        assert len(seen) == len(uses)
        assert all(found == wanted for found, wanted in seen)
        assert cache.built == bool(uses)


def test_a_graph_keeps_a_table_that_then_moves_no_more() -> None:
    with late_gpu() as device:
        cache = TableCache()
        weights = FixedTensors([torch.zeros(3, device=GPU)])
        layout = Layout(weights)

        def find(address: int) -> AddressTable:
            moving = MovingTensors(weights, array("q", [address]), layout)
            return tensor_tables([weights, moving], chunk=8, cache=cache)[0]

        before = find(160)
        device.finish()
        device.capturing = True
        assert find(160) is before
        inside = find(320)
        device.capturing = False
        device.finish()
        after = find(320)
        device.finish()
        assert len({id(table) for table in (before, inside, after)}) == 3
        assert before.data[1] == 160
        assert after.data[1] == 320


def test_a_moved_address_that_is_no_multiple_of_16_takes_the_other_path_and_back() -> None:
    weights = FixedTensors([torch.zeros(4), torch.zeros(4)])
    layout, cache = Layout(weights), TableCache()
    for addresses in ([16, 32], [16, 36], [20, 36], [48, 64]):
        moving = MovingTensors(weights, array("q", addresses), layout)
        (table,) = tensor_tables([weights, moving], chunk=8, cache=cache)
        assert table.data[2:4].tolist() == addresses
        assert table.data[6:8].tolist() == [int(a % 16 == 0) for a in addresses]
