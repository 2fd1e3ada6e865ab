"""Launches of several threads: each has its own settings, and the memory is everyone's."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from time import sleep

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.lockstep import in_lock_step, switching_at_launches
from twinstep import replay
from twinstep.replay import (
    InvalidArithmetic,
    LimitReached,
    NoProgress,
    OutOfBounds,
    ReplayError,
    UninitialisedRead,
    Unwritten,
    allow,
    launches,
    modelled_gpu,
    options,
    run_ptx,
)
from twinstep.replay.dtypes import Array
from twinstep.replay.launch.options import TUNING
from twinstep.replay.launch.run import program_of
from twinstep.replay.machine import atomics
from twinstep.replay.shadow64 import runtime
from twinstep.replay.shadow64.lift import lifting
from twinstep.replay.translate.checked import checked
from twinstep.replay.triton import driver

HEAD = '.version 8.7\n.target sm_90\n.address_size 64\n.file 1 "kernel.py"\n'


def ptx(body: str) -> str:
    """A kernel `k` of two addresses, in %rd0 and %rd1."""
    return f"""{HEAD}.visible .entry k(.param .u64 a, .param .u64 b) {{
    .reg .b32 %r<20>; .reg .b64 %rd<9>; .reg .pred %p<5>; .reg .f32 %f<9>;
    ld.param.u64 %rd0, [a]; ld.param.u64 %rd1, [b]; mov.u32 %r0, %tid.x;
    .loc 1 5 0
    {body}
    ret; }}"""


NOTE_ORDER = ptx("""mov.u32 %r3, %ctaid.x; atom.global.add.u32 %r1, [%rd0], 1;
    mul.wide.u32 %rd2, %r1, 4; add.u64 %rd1, %rd1, %rd2; st.global.u32 [%rd1], %r3;""")
COPY = ptx("ld.global.u32 %r1, [%rd0]; st.global.u32 [%rd1], %r1;")
DIVIDE = ptx("""ld.global.u32 %r1, [%rd0]; div.u32 %r2, %r1, %r1; st.global.u32 [%rd1], %r2;""")
AWAIT = ptx("""AGAIN: ld.volatile.global.u32 %r1, [%rd0]; setp.eq.u32 %p1, %r1, 0;
    @%p1 bra AGAIN; st.global.u32 [%rd1], %r1;""")
ADD_TWENTY_TIMES = ptx("""mov.u32 %r5, 0;
    AGAIN: atom.global.add.u32 %r1, [%rd0], 1; add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, 20;
    @%p1 bra AGAIN;""")


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads are interrupted after a few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


def words(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@triton.jit
def third(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # Triton 3.9 makes `/ 3.0` a product with a rounded reciprocal.
    tl.store(x_ptr + at, tl.div_rn(tl.load(x_ptr + at, mask=at < n), 3.0), mask=at < n)


@triton.jit
def first_of_the_table(table_ptr, out_ptr):
    tl.store(out_ptr, tl.load(tl.load(table_ptr).to(tl.pointer_type(tl.float32))))


ORDERS = {
    "natural": [0, 1, 2, 3, 4, 5],
    "backwards": [5, 4, 3, 2, 1, 0],
    "ends": [0, 5, -1, -1, -1, -1],
}


def order_of_blocks(switch: Callable[[], None], order: str) -> list[int]:
    """The order in which six blocks ran, with a turn given away after each."""
    count, seen = words(0), torch.full((6,), -1, dtype=torch.int32)
    if order == "ends":
        setting = options(only_ends=1, together=1, after_batch=switch)
    else:
        setting = options(order=order, together=1, after_batch=switch)
    with setting:
        run_ptx(NOTE_ORDER, "k", (6,), (1,), [count, seen])
    return seen.tolist()


@settings(max_examples=10)
@given(st.lists(st.sampled_from(list(ORDERS)), min_size=2, max_size=4))
def test_options_are_those_of_the_thread_at_every_batch(chosen: list[str]) -> None:
    found = in_lock_step(*[partial(order_of_blocks, order=order) for order in chosen])
    assert found == [ORDERS[order] for order in chosen]


def test_a_check_of_one_thread_is_none_of_another() -> None:
    def divided(switch: Callable[[], None], check: bool) -> str:
        with options(check_arithmetic=check, after_batch=switch):
            switch()
            try:
                run_ptx(DIVIDE, "k", (1,), (1,), [words(0), words(0)])
            except InvalidArithmetic as error:
                return str(error).partition(":")[0]
        return "quiet"

    found = in_lock_step(partial(divided, check=True), partial(divided, check=False))
    assert found == ["division of an integer by zero", "quiet"]


def test_unwritten_bytes_are_known_to_the_thread_that_declared_them() -> None:
    shared = torch.zeros(1, dtype=torch.int32)

    def read(switch: Callable[[], None], declared: bool) -> list[str]:
        noted = Unwritten([shared] if declared else [], raises=False)
        with options(uninitialised=noted, after_batch=switch):
            switch()
            run_ptx(COPY, "k", (1,), (1,), [shared, words(0)])
        return noted.reads

    one, other = in_lock_step(partial(read, declared=True), partial(read, declared=False))
    assert len(one) == 1
    assert other == []
    with options(uninitialised=[shared]), pytest.raises(UninitialisedRead):
        run_ptx(COPY, "k", (1,), (1,), [shared, words(0)])


def test_memory_that_one_thread_allows_is_out_of_bounds_for_another() -> None:
    hidden = words(7)

    def read(switch: Callable[[], None], allowed: bool) -> object:
        out = words(0)
        with allow(hidden=hidden) if allowed else contextlib.nullcontext():
            switch()
            try:
                launch = run_ptx(COPY, "k", (1,), (1,), [hidden.data_ptr(), out])
            except OutOfBounds:
                return "out of bounds"
            finally:
                switch()
        return launch.buffers["hidden"].read, out.item()

    found = in_lock_step(partial(read, allowed=True), partial(read, allowed=False))
    assert found == [(4, 7), "out of bounds"]


def test_a_log_holds_the_launches_of_its_thread() -> None:
    def logged(switch: Callable[[], None], blocks: int) -> list[int]:
        with launches() as log:
            for extra in range(3):
                switch()
                run_ptx(COPY, "k", (blocks + extra,), (1,), [words(1), words(0)])
        switch()
        return [launch.grid[0] for launch in log]

    with launches() as outside:
        found = in_lock_step(partial(logged, blocks=1), partial(logged, blocks=11))
    assert found == [[1, 2, 3], [11, 12, 13]]
    assert outside == []


def test_a_launch_that_a_tuner_makes_in_another_thread_is_not_this_one() -> None:
    def tuned(switch: Callable[[], None], tuning: bool) -> bool:
        token = TUNING.set(tuning)
        switch()
        launch = run_ptx(COPY, "k", (1,), (1,), [words(1), words(0)])
        switch()
        TUNING.reset(token)
        return launch.tuning

    assert in_lock_step(partial(tuned, tuning=True), partial(tuned, tuning=False)) == [True, False]


def test_one_thread_lifts_while_another_does_not(
    replay: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lifted(start: float) -> list[float]:
        x = torch.full((4,), start)
        with lifting([x]) as lift:
            for _ in range(3):
                third[(1,)](x, 4, BLOCK=4)
        return lift.read(x).value.tolist()

    def plain(start: float) -> list[float]:
        x = torch.full((4,), start)
        for _ in range(3):
            third[(1,)](x, 4, BLOCK=4)
        return x.tolist()

    runs = [partial(lifted, 1.0), partial(plain, 1.0), partial(lifted, 5.0)]
    alone = [run() for run in runs]
    assert alone[0] == [1.0 / 3.0 / 3.0 / 3.0] * 4 != alone[1]
    assert switching_at_launches(monkeypatch, *runs) == alone


class Interrupted(dict[str, int]):
    """Another thread runs whenever the length is asked for."""

    def __len__(self) -> int:
        found = super().__len__()
        sleep(0.001)
        return found


def test_two_texts_have_two_numbers_whichever_threads_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, int]] = []
    monkeypatch.setattr(runtime, "_SITES", Interrupted())

    def ask(place: int) -> None:
        texts = [f"instruction {place if i % 2 else ''} {i}" for i in range(10)]
        found.append({text: runtime.site_number(text) for text in texts})

    join([in_thread(partial(ask, place)) for place in range(4)])
    numbers = {text: number for one in found for text, number in one.items()}
    assert all(one.items() <= numbers.items() for one in found)
    assert len(set(numbers.values())) == len(numbers)
    assert all(runtime.site_text(number) == text for text, number in numbers.items())


def gpu() -> tuple[int, bool]:
    """The number of GPUs that torch finds here, and whether a tensor can be on one."""
    try:
        return torch.cuda.device_count(), torch.ones(1, device="cuda").is_cuda
    except (AssertionError, RuntimeError):
        return torch.cuda.device_count(), False


def test_a_gpu_is_modelled_for_the_thread_that_asked() -> None:
    before, there = (torch.cuda.is_available, torch.cuda.Stream), gpu()

    def described(switch: Callable[[], None], model: bool) -> object:
        with modelled_gpu() if model else contextlib.nullcontext():
            switch()
            seen = gpu()
            if model:
                assert isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
            switch()
        return seen

    models = [partial(described, model=model) for model in (True, False, True)]
    assert in_lock_step(*models) == [(1, True), there, (1, True)]
    assert (torch.cuda.is_available, torch.cuda.Stream) == before


def test_a_thread_that_flushes_subnormals_is_refused_and_others_are_not() -> None:
    def flushing(switch: Callable[[], None], flush: bool) -> str:
        if flush and not torch.set_flush_denormal(True):
            pytest.skip("this CPU cannot flush subnormals")
        try:
            switch()
            run_ptx(COPY, "k", (1,), (1,), [words(1), words(0)])
        except ReplayError as error:
            return str(error).partition(" in this thread")[0]
        finally:
            switch()
            torch.set_flush_denormal(False)
        return "ran"

    found = in_lock_step(partial(flushing, flush=True), partial(flushing, flush=False))
    assert found == ["Subnormal floats are flushed to zero", "ran"]


# --- of the process ------------------------------------------------------------------------


def test_replay_is_on_while_a_thread_has_it_on() -> None:
    before, there = triton.runtime.driver._active, gpu()

    def first(switch: Callable[[], None]) -> list[object]:
        replay.activate(cuda=True)
        switch()
        seen = [driver.active(), gpu()]
        replay.deactivate()
        replay.deactivate()  # one too many takes nothing from the other thread
        seen += [driver.active(), gpu()]
        switch()
        return [*seen, driver.active()]

    def second(switch: Callable[[], None]) -> list[object]:
        replay.activate()
        switch()
        seen = [driver.active(), gpu()]
        replay.deactivate()
        return [*seen, driver.active()]

    one, other = in_lock_step(first, second)
    assert one == [True, (1, True), True, there, False]
    assert other == [True, there, False]
    assert triton.runtime.driver._active is before


def test_a_text_is_translated_once_for_all_threads(hurried: None) -> None:
    text, found = COPY.replace("kernel.py", "kernel_of_many.py"), []
    meeting = threading.Barrier(4, timeout=600)

    def ask() -> None:
        meeting.wait()
        program, _ = program_of(text, "k")
        found.append((program, checked(program).source))

    join([in_thread(ask) for _ in range(4)])
    assert len(found) == 4
    assert all(program is found[0][0] and source == found[0][1] for program, source in found)


# --- memory is everyone's ------------------------------------------------------------------


def test_a_launch_may_wait_for_what_another_thread_launches_later() -> None:
    flag, out, copied = words(0), words(0), words(0)
    waiting = in_thread(lambda: run_ptx(AWAIT, "k", (1,), (1,), [flag, out]))
    run_ptx(COPY, "k", (1,), (1,), [words(9), copied])
    run_ptx(COPY, "k", (1,), (1,), [words(5), flag])
    join([waiting])
    assert (out.item(), copied.item()) == (5, 9)


def test_a_launch_that_waits_in_company_is_not_said_to_wait_for_ever() -> None:
    """The other thread launches for longer than the same loop is given where it is alone."""
    patience, flag, out = 1.2, words(0), words(0)
    ended: list[object] = []

    def wait() -> None:
        with options(patience=patience):
            try:
                ended.append(run_ptx(AWAIT, "k", (1,), (1,), [flag, out]))
            except ReplayError as error:
                ended.append(error)

    with options(patience=patience), pytest.raises(NoProgress):
        run_ptx(AWAIT, "k", (1,), (1,), [flag, out])
    waiting = in_thread(wait)
    while waiting.is_alive():
        run_ptx(COPY, "k", (1,), (1,), [words(9), words(0)])
    assert isinstance(ended[0], LimitReached)


@pytest.mark.parametrize("threads", [1, 3])
def test_no_atomic_of_two_threads_is_lost(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    count, rest = words(0), words(0)

    def add(old: Array, value: Array) -> Array:
        sleep(0.0005)  # another thread runs between the read and the write
        return old + value

    monkeypatch.setitem(atomics._UFUNCS, "add", add)
    text = ADD_TWENTY_TIMES.replace("kernel.py", f"{threads}.py")  # translated anew, with that sum
    join([in_thread(lambda: run_ptx(text, "k", (1,), (4,), [count, rest])) for _ in range(threads)])
    assert count.item() == threads * 20 * 4


def test_tables_of_each_thread_lead_to_its_own_tensors(
    replay: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def through(value: float) -> float:
        x, out = torch.full((1,), value), torch.zeros(1)
        table = torch.tensor([x.data_ptr()])
        for _ in range(2):
            first_of_the_table[(1,)](table, out)
        return out.item()

    assert switching_at_launches(monkeypatch, partial(through, 2.0), partial(through, 3.0)) == [
        2.0,
        3.0,
    ]
