"""Acquiring and releasing threads, and what the threads that they meet know of other blocks."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from twinstep.replay import Race, options, run_ptx
from twinstep.replay.checks.history import NOBODY, Trace

pytestmark = pytest.mark.usefixtures("replay")

HEAD = """.version 8.7
.target sm_90
.address_size 64
.visible .entry k(.param .u64 x, .param .u64 flag) {
.reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<9>;
ld.param.u64 %rd0, [x]; ld.param.u64 %rd1, [flag]; mov.u32 %r0, %ctaid.x; mov.u32 %r3, %tid.x;
mul.wide.u32 %rd2, %r3, 4; add.u64 %rd3, %rd0, %rd2; setp.eq.u32 %p3, %r3, 0;
setp.eq.u32 %p1, %r0, 1; @%p1 bra SECOND; setp.eq.u32 %p1, %r0, 2; @%p1 bra THIRD;
"""


def words(count: int = 1) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def judge(body: str, right: bool, threads: int = 64, blocks: int = 2) -> None:
    """Run a body whose blocks other than the first begin at SECOND and THIRD."""
    if "THIRD:" not in body:
        body += "\nTHIRD: ret;"
    with options(check_races=True):
        if right:
            run_ptx(HEAD + body + "}", "k", (blocks,), (threads,), [words(threads), words(4)])
            return
        with pytest.raises(Race, match="of argument 0 without order after a"):
            run_ptx(HEAD + body + "}", "k", (blocks,), (threads,), [words(threads), words(4)])


ACQUIRED = """st.global.u32 [%rd3], 7; bar.sync 0;
@%p3 atom.global.release.gpu.exch.b32 %r1, [%rd1], 1; ret;
SECOND: @!%p3 bra MEET;
WAIT: atom.global.acquire.gpu.add.u32 %r1, [%rd1], 0; setp.eq.u32 %p2, %r1, 0; @%p2 bra WAIT;
MEET: BARRIER
ld.global.u32 %r2, [PLACE]; ret;"""


@pytest.mark.parametrize(
    ("barrier", "place", "threads", "right"),
    [
        ("", "%rd3", 1, True),
        ("", "%rd3", 2, False),
        ("@!%p3 ret;", "%rd3", 64, True),
        ("@!%p3 ret;", "%rd0+252", 64, True),
        ("bar.warp.sync -1;", "%rd3", 32, True),
        ("bar.warp.sync -1;", "%rd3", 64, False),
        ("bar.sync 0;", "%rd3", 64, True),
        ("bar.sync 1, 64;", "%rd3", 64, True),
        ("setp.ge.u32 %p4, %r3, 64; @%p4 bra ON; bar.sync 1, 64; ON:", "%rd3", 96, False),
    ],
)
def test_what_one_thread_acquires_is_known_to_others_after_a_barrier(
    barrier: str, place: str, threads: int, right: bool
) -> None:
    judge(ACQUIRED.replace("BARRIER", barrier).replace("PLACE", place), right, threads)


@pytest.mark.parametrize(("place", "right"), [("%rd0", True), ("%rd0+128", False)])
@pytest.mark.parametrize("flag", ["%rd1", "%rd1+4"])
def test_a_flag_makes_known_what_its_own_thread_has_done(
    place: str, flag: str, right: bool
) -> None:
    """Threads 0 and 32 store and raise a flag each; the other block waits for one of them."""
    if flag == "%rd1+4":
        right = not right
    body = f"""and.b32 %r4, %r3, 31; setp.ne.u32 %p4, %r4, 0; @%p4 ret;
    st.global.u32 [%rd3], 7; shr.u32 %r5, %r3, 5; mul.wide.u32 %rd4, %r5, 4;
    add.u64 %rd5, %rd1, %rd4; atom.global.release.gpu.exch.b32 %r1, [%rd5], 1; ret;
    SECOND: @!%p3 ret;
    WAIT: ld.global.acquire.gpu.u32 %r1, [{flag}]; setp.eq.u32 %p2, %r1, 0; @%p2 bra WAIT;
    ld.global.u32 %r2, [{place}]; ret;"""
    judge(body, right)


@pytest.mark.parametrize(
    ("raised", "waits", "right"),
    [
        ("st.global.release.gpu.u32 [%rd1], 1;", "ld.global.acquire.gpu.u32 %r1, [%rd1];", True),
        ("st.global.release.cta.u32 [%rd1], 1;", "ld.global.acquire.gpu.u32 %r1, [%rd1];", False),
        ("st.global.release.gpu.u32 [%rd1], 1;", "ld.global.acquire.cta.u32 %r1, [%rd1];", False),
        ("st.global.relaxed.gpu.u32 [%rd1], 1;", "ld.global.acquire.gpu.u32 %r1, [%rd1];", False),
        ("st.global.release.gpu.u32 [%rd1], 1;", "ld.global.relaxed.gpu.u32 %r1, [%rd1];", False),
        ("red.global.release.gpu.add.u32 [%rd1], 1;", "ld.acquire.gpu.global.u32 %r1, [%rd1];",
         True),
        ("atom.global.acquire.gpu.add.u32 %r1, [%rd1], 1;",
         "atom.global.acquire.gpu.add.u32 %r1, [%rd1], 0;", False),
        ("atom.global.release.gpu.add.u32 %r1, [%rd1], 1;",
         "atom.global.release.gpu.add.u32 %r1, [%rd1], 0;", False),
        ("membar.gl; st.volatile.global.u32 [%rd1], 1;",
         "ld.volatile.global.u32 %r1, [%rd1]; membar.gl;", True),
    ],
)  # fmt: skip
def test_each_side_of_a_hand_over_needs_its_own_word(raised: str, waits: str, right: bool) -> None:
    """Two threads, one in each block."""
    body = f"""st.global.u32 [%rd3], 7; {raised} ret;
    SECOND: {waits} setp.eq.u32 %p2, %r1, 0; @%p2 bra SECOND; ld.global.u32 %r2, [%rd3]; ret;"""
    if ".cta" in raised or ".cta" in waits:
        text = HEAD + body + "\nTHIRD: ret; }"
        with options(check_races=True), pytest.raises(Race, match="without order after a"):
            run_ptx(text, "k", (2,), (1,), [words(), words(4)])
        return
    judge(body, right, 1)


@pytest.mark.parametrize(
    ("passes_on", "barrier", "right"),
    [("%p3", "", True), ("%p4", "", False), ("%p4", "bar.sync 0;", True)],
)
def test_what_is_passed_on_must_be_known_to_the_thread_that_does(
    passes_on: str, barrier: str, right: bool
) -> None:
    """The first thread of the second block waits; it, or thread 32, raises the third's flag."""
    body = f"""@%p3 st.global.u32 [%rd0], 7;
    @%p3 atom.global.release.gpu.exch.b32 %r1, [%rd1], 1; ret;
    SECOND: setp.eq.u32 %p4, %r3, 32; @!%p3 bra MEET;
    WAIT: atom.global.acquire.gpu.add.u32 %r1, [%rd1], 0; setp.eq.u32 %p2, %r1, 0; @%p2 bra WAIT;
    MEET: {barrier} @{passes_on} atom.global.release.gpu.exch.b32 %r1, [%rd1+4], 1; ret;
    THIRD: @!%p3 ret;
    LATE: atom.global.acquire.gpu.add.u32 %r1, [%rd1+4], 0; setp.eq.u32 %p2, %r1, 0; @%p2 bra LATE;
    ld.global.u32 %r2, [%rd0]; ret;"""
    judge(body, right, 64, 3)


def test_the_store_that_releases_is_known_to_whoever_acquires_it() -> None:
    body = """atom.global.acq_rel.gpu.add.u32 %r1, [%rd0], 1; ret;
    SECOND: atom.global.acq_rel.gpu.add.u32 %r1, [%rd0], 0; setp.eq.u32 %p2, %r1, 0;
    @%p2 bra SECOND; ld.global.u32 %r2, [%rd0]; st.global.u32 [%rd0], 0; ret;"""
    judge(body, True, 1)


@triton.jit
def histogram(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out_ptr + tl.load(x_ptr + at), 1)


@triton.jit
def spin(lock_ptr, total_ptr):
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(total_ptr, tl.load(total_ptr) + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


def test_many_releases_take_no_minutes() -> None:
    x = torch.randint(0, 997, (32 * 512,), generator=torch.Generator().manual_seed(0)).int()
    out, lock, total = words(997), words(), words()
    started = time.process_time()
    with options(check_races=True):
        histogram[(32,)](x, out, BLOCK=512)
        spin[(12,)](lock, total)
    assert torch.equal(out, torch.bincount(x, minlength=997).int())
    assert total.item() == 12
    assert time.process_time() - started < 8.0  # measured 0.8 on 2 shared cores


@pytest.mark.parametrize("at_once", [True, False])
def test_a_word_remembers_two_readers_and_those_of_two_more_blocks(at_once: bool) -> None:
    """A block that writes may be the last to read, and must not hide the others so."""
    trace, threads = Trace(3, 32), (0, 40, 41, 70, 71)
    events = np.array([[thread, 0, 0, 0, number] for number, thread in enumerate(threads)])
    for part in [events] if at_once else events[:, None]:
        trace.read(np.full(len(part), 1), part)
    assert [int(reads[1, 0]) for reads in trace.reads] == [71, 70, 41, 0]
    assert all((reads[[0, 2]] == NOBODY).all() for reads in trace.reads)
