"""Streams of the modelled GPU: work that touches the same bytes on two of them needs an order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import twinstep.replay


@triton.jit
def add(a, g, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(a + at, mask=at < n) + tl.load(g + at, mask=at < n)
    tl.store(a + at, total, mask=at < n)


@triton.jit
def count(total):
    tl.atomic_add(total, 1.0)


Work = Callable[[Tensor, Tensor], object]
WORKS: dict[str, Work] = {
    "kernel add": lambda a, g: add[(2,)](a, g, 300, BLOCK=256),
    "torch's add_": lambda a, g: a.add_(g),
    "torch's _foreach_add_": lambda a, g: torch._foreach_add_([a], [g]),
    "torch's __setitem__": lambda a, g: a.__setitem__(0, g[0]),
    "torch's add": lambda a, g: torch.add(a, g, out=a),
}


def _event(here: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
    event = torch.cuda.Event()
    event.record(side)
    here.wait_event(event)


def _read(here: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
    with side:
        torch.zeros(1, device="cuda").item()


def _size_from_values(here: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
    with side:
        torch.ones(3, device="cuda")[torch.ones(3, device="cuda") > 0]


def _copy_to_the_host(here: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
    with side:
        torch.empty(3).copy_(torch.ones(3, device="cuda"))


WAITS: dict[str, Callable[[torch.cuda.Stream, torch.cuda.Stream], object]] = {
    "wait_stream": lambda here, side: here.wait_stream(side),
    "an event": _event,
    "record_event": lambda here, side: side.record_event().wait(),
    "synchronize": lambda here, side: torch.cuda.synchronize(),
    "its synchronize": lambda here, side: side.synchronize(),
    "synchronize of an event": lambda here, side: side.record_event().synchronize(),
    "query": lambda here, side: side.query(),
    "a read by the host": _read,
    "a size that values say": _size_from_values,
    "a copy to the host": _copy_to_the_host,
}


@pytest.fixture(autouse=True)
def _replay() -> Iterator[None]:
    twinstep.replay.activate()
    try:
        yield
    finally:
        twinstep.replay.deactivate()


def _call(launcher: Callable[[Tensor, Tensor], object], *, checked: bool = True) -> None:
    a, g = torch.ones(300), torch.ones(300)
    options = twinstep.replay.options(check_races=checked)
    with twinstep.replay.allow(a=a, g=g), options, twinstep.replay.modelled_gpu():
        launcher(a, g)


def _beside(work: Work, wait: str | None, *, begins: bool = True) -> Work:
    """Work on a new stream, which waits for the old one if it `begins`; the old one's `wait`."""

    def launcher(a: Tensor, g: Tensor) -> None:
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()
        if begins:
            side.wait_stream(here)
        with torch.cuda.stream(side):
            assert torch.cuda.current_stream() == side != here
            work(a, g)
        assert torch.cuda.current_stream() == here
        if wait is not None:
            WAITS[wait](here, side)

    return launcher


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("name", WORKS)
def test_work_on_a_stream_that_waits_and_is_awaited_passes(name: str, wait: str) -> None:
    _call(_beside(WORKS[name], wait))


@pytest.mark.parametrize("name", WORKS)
def test_a_stream_that_nothing_waits_for(name: str) -> None:
    with pytest.raises(twinstep.replay.Race, match=f"caller's later work and {name} both touch a"):
        _call(_beside(WORKS[name], None))
    _call(_beside(WORKS[name], None), checked=False)


@pytest.mark.parametrize("name", WORKS)
def test_a_stream_that_does_not_wait(name: str) -> None:
    # torch reads g[0] first, which is a view and no work.
    named = name[0].upper() + name[1:]
    with pytest.raises(twinstep.replay.Race, match=f"{named} and the caller's earlier work both"):
        _call(_beside(WORKS[name], "wait_stream", begins=False))


def facts(a: Tensor, g: Tensor) -> None:
    a.add_(g)
    assert (a.ndim, a.requires_grad, a.is_floating_point(), a.grad, len(a)) == (1, 0, 1, None, 300)
    a.requires_grad_(False)


def test_what_is_known_without_its_values_is_no_wait() -> None:
    with pytest.raises(twinstep.replay.Race, match="later work and torch's add_"):
        _call(_beside(facts, None))


def test_flags_of_a_tensor_are_no_work() -> None:
    _call(_beside(lambda a, g: a.requires_grad_(False).detach_(), None, begins=False))


def test_an_event_of_an_earlier_call_orders_nothing() -> None:
    kept: list[tuple[torch.cuda.Stream, torch.cuda.Event]] = []

    def launcher(a: Tensor, g: Tensor) -> None:
        first = not kept
        if first:
            kept.append((torch.cuda.Stream(), torch.cuda.Event()))
        here, (side, event) = torch.cuda.current_stream(), kept[0]
        side.wait_stream(here)
        with torch.cuda.stream(side):
            a.add_(g)
            if first:
                event.record()
        here.wait_event(event)

    _call(launcher)
    with pytest.raises(twinstep.replay.Race, match="later work and torch's add_"):
        _call(launcher)


def test_an_event_recorded_too_early_orders_nothing() -> None:
    def launcher(a: Tensor, g: Tensor) -> None:
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(here)
        event = side.record_event()
        with torch.cuda.stream(side):
            a.add_(g)
        here.wait_event(event)

    with pytest.raises(twinstep.replay.Race, match="later work and torch's add_"):
        _call(launcher)


def test_two_streams_that_know_of_each_other_only_through_a_third() -> None:
    def launcher(a: Tensor, g: Tensor) -> None:
        here, one, two = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
        one.wait_stream(here)
        with torch.cuda.stream(one):
            a.add_(g)
        here.wait_stream(one)
        two.wait_stream(here)
        with torch.cuda.stream(two):
            a.add_(g)
        here.wait_stream(two)

    _call(launcher)


def test_disjoint_halves_and_reads_of_the_same_bytes_need_no_order() -> None:
    def launcher(a: Tensor, g: Tensor) -> None:
        here, one, two = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
        for side, half in ((one, slice(0, 150)), (two, slice(150, 300))):
            side.wait_stream(here)
            with torch.cuda.stream(side):
                add[(1,)](a[half], g, 150, BLOCK=256)
        here.wait_stream(one)
        here.wait_stream(two)

    _call(launcher)


def test_work_of_its_own_needs_no_order_and_results_do() -> None:
    def launcher(a: Tensor, g: Tensor, *, waits: bool) -> None:
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()
        with torch.cuda.stream(side):
            ones = torch.full((300,), 1.0, device="cuda")
            a.view(-1).numel()
        if waits:
            here.wait_stream(side)
        a.add_(ones)

    _call(lambda a, g: launcher(a, g, waits=True))
    with pytest.raises(twinstep.replay.Race, match="Torch's add_ and torch's full both"):
        _call(lambda a, g: launcher(a, g, waits=False))


@pytest.mark.parametrize("reads", [False, True])
def test_atomics_of_two_streams_need_no_order_and_their_reader_does(reads: bool) -> None:
    def launcher(a: Tensor, g: Tensor) -> None:
        here, one, two = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
        for side in (one, two):
            side.wait_stream(here)
            with torch.cuda.stream(side):
                count[(4,)](a)
        with torch.cuda.stream(two):
            if reads:
                add[(1,)](g, a, 1, BLOCK=64)
        here.wait_stream(one)
        here.wait_stream(two)

    if not reads:
        _call(launcher)
        return
    with pytest.raises(twinstep.replay.Race, match="Kernel add and kernel count both touch"):
        _call(launcher)


def test_what_the_host_makes_is_no_work_of_a_stream() -> None:
    def launcher(a: Tensor, g: Tensor) -> None:
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()
        table = torch.tensor([1.0, 2.0])
        table.mul_(2)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            a[:2].copy_(table)
        here.wait_stream(side)

    _call(launcher)


@pytest.mark.parametrize("back", [True, False])
def test_a_stream_that_is_set_is_the_callers_too_until_it_is_set_back(back: bool) -> None:
    def launcher(a: Tensor, g: Tensor) -> None:
        before, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(side)
        assert torch.cuda.current_stream().cuda_stream == side.cuda_stream != 0
        a.add_(g)
        torch.cuda.synchronize()
        if back:
            torch.cuda.set_stream(before)

    refused = pytest.raises(twinstep.replay.Race, match="found stream 0 and leaves stream")
    with contextlib.nullcontext() if back else refused:
        _call(launcher)
    with twinstep.replay.modelled_gpu():
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
