"""Blocks that meet in global memory: batches, orders, scopes of atomics, stores of equal values."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import triton
import triton.language as tl

from twinstep.replay import Deadlock, Race, options, run_ptx

pytestmark = pytest.mark.usefixtures("replay")


@triton.jit
def grid_barrier(count_ptr, x_ptr, out_ptr, programs, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + pid * BLOCK + at, pid + at)
    tl.debug_barrier()
    tl.atomic_add(count_ptr, 1)
    while tl.atomic_add(count_ptr, 0) != programs:
        pass
    other = (pid + 1) % programs
    tl.store(out_ptr + pid * BLOCK + at, tl.load(x_ptr + other * BLOCK + at))


@triton.jit
def clear_and_set(flag_ptr, out_ptr, last):
    tl.store(flag_ptr, 0)
    if tl.program_id(0) == last:
        tl.store(flag_ptr, 1)


@triton.jit
def all_set(flag_ptr):
    tl.store(flag_ptr, 1)


@triton.jit
def lock_of_scope(lock_ptr, total_ptr, SCOPE: tl.constexpr):
    while tl.atomic_cas(lock_ptr, 0, 1, scope=SCOPE) == 1:
        pass
    tl.store(total_ptr, tl.load(total_ptr) + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0, scope=SCOPE)


@triton.jit
def lock_of_many(lock_ptr, total_ptr, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    at = tl.arange(0, BLOCK)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(total_ptr + at, tl.load(total_ptr + at) + 1)  # inside
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


def words(count: int = 1) -> torch.Tensor:
    """Zeros, int32."""
    return torch.zeros(count, dtype=torch.int32)


@pytest.mark.parametrize("num_warps", [4, 8, 32])
def test_a_barrier_of_one_block_on_each_multiprocessor_is_passed(num_warps: int) -> None:
    x, out = words(132 * 256), words(132 * 256)
    grid_barrier[(132,)](words(), x, out, 132, BLOCK=256, num_warps=num_warps)
    want = (torch.arange(1, 133) % 132)[:, None] + torch.arange(256)
    assert torch.equal(out.reshape(132, 256), want.int())


def test_more_blocks_than_run_together_cannot_wait_for_one_another() -> None:
    x, out = words(6 * 256), words(6 * 256)
    with options(patience=2, together=5), pytest.raises(Deadlock):
        grid_barrier[(6,)](words(), x, out, 6, BLOCK=256)
    with options(together=6):
        grid_barrier[(6,)](words(), x, out, 6, BLOCK=256)


@pytest.mark.parametrize("order", ["natural", "backwards", "permuted"])
@pytest.mark.parametrize("together", [1, 3])
def test_what_depends_on_the_order_of_blocks_shows_in_small_batches(
    order: str, together: int
) -> None:
    flag = words()
    with options(order=order, together=together, seed=3):
        clear_and_set[(12,)](flag, words(), 11)
    last = {"natural": True, "backwards": together == 12, "permuted": False}[order]
    assert flag.item() == int(last)


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match="natural, backwards, permuted"), options(order="upside"):
        pass


def test_blocks_that_store_one_value_do_no_harm_and_those_that_undo_it_race() -> None:
    for flag in (words(), words() + 1):
        with options(check_races=True):
            all_set[(2,)](flag)
    with options(check_races=True), pytest.raises(Race, match="write of 4 bytes of flag_ptr"):
        clear_and_set[(512,)](words(), words(), 3)


@pytest.mark.parametrize("scope", ["gpu", "sys", "cta"])
def test_a_lock_between_blocks_needs_a_scope_that_reaches_them(scope: str) -> None:
    lock, total = words(), words()
    with options(check_races=True):
        if scope != "cta":
            lock_of_scope[(4,)](lock, total, SCOPE=scope)
            assert total.item() == 4
            return
        with pytest.raises(Race, match="atomic of 4 bytes of lock_ptr without order after a"):
            lock_of_scope[(4,)](lock, total, SCOPE=scope)


# Block 0 stores a word for each thread and raises a flag; the others wait for it and read.
HEAD = """.version 8.7
.target sm_90
.address_size 64
.visible .entry k(.param .u64 x, .param .u64 flag) {
.reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<5>;
ld.param.u64 %rd0, [x]; ld.param.u64 %rd1, [flag]; mov.u32 %r0, %ctaid.x; mov.u32 %r3, %tid.x;
mul.wide.u32 %rd2, %r3, 4; add.u64 %rd0, %rd0, %rd2; setp.eq.u32 %p3, %r3, 0;
setp.ne.u32 %p1, %r0, 0; @%p1 bra READ;
"""
FENCED = (
    HEAD
    + """st.global.u32 [%rd0], 7; BEFORE
@%p3 atom.global.relaxed.gpu.exch.b32 %r1, [%rd1], 1; ret;
READ: @%p3 atom.global.relaxed.gpu.add.u32 %r1, [%rd1], 0;
@%p3 setp.eq.u32 %p2, %r1, 0; @!%p3 setp.ne.u32 %p2, %r3, %r3; @%p2 bra READ;
AFTER ld.global.u32 %r2, [%rd0]; ret; }"""
)
GPU = "membar.gl;"


@pytest.mark.parametrize(
    ("before", "after", "threads", "right"),
    [
        (GPU, GPU, 1, True),
        (GPU, "", 1, False),
        ("", GPU, 1, False),
        (GPU, "membar.cta;", 1, False),
        ("membar.cta;", GPU, 1, False),
        ("fence.acq_rel.gpu;", "fence.sc.sys;", 1, True),
        ("fence.release.gpu;", "fence.acquire.gpu;", 1, True),
        ("fence.acquire.gpu;", GPU, 1, False),
        (GPU, "fence.release.gpu;", 1, False),
        ("fence.proxy.async;", "fence.sc.sys;", 1, False),
        (GPU + "st.global.u32 [%rd0], 8;", GPU, 1, False),
        (GPU + "bar.sync 0;", GPU + "bar.sync 0;", 64, True),
        ("bar.sync 0; @%p3 " + GPU, "@%p3 membar.gl; bar.sync 0;", 64, True),
        ("bar.sync 0; @%p3 " + GPU, "bar.sync 0;" + GPU, 64, True),
        ("@%p3 membar.gl; bar.sync 0;", "@%p3 membar.gl; bar.sync 0;", 64, False),
        ("bar.sync 0; @%p3 " + GPU, "bar.sync 0;", 64, False),
        # Of more than four threads at once it counts as anybody's.
        ("bar.sync 0; @!%p3 " + GPU, "@%p3 membar.gl; bar.sync 0;", 4, False),
    ],
)
def test_relaxed_atomics_order_blocks_behind_a_fence_and_before_one(
    before: str, after: str, threads: int, right: bool
) -> None:
    text = FENCED.replace("BEFORE", before).replace("AFTER", after)
    late = pytest.raises(Race, match="read of 4 bytes of argument 0")
    with options(check_races=True), nullcontext() if right else late:
        run_ptx(text, "k", (2,), (threads,), [words(threads), words()])


@pytest.mark.parametrize("asks", ["relaxed", "acquire"])
def test_whoever_asks_before_takes_nothing_away(asks: str) -> None:
    text = FENCED.replace("BEFORE", GPU).replace("AFTER", GPU)
    text = text.replace("relaxed.gpu.add", f"{asks}.gpu.add")
    with options(check_races=True):
        run_ptx(text, "k", (5,), (1,), [words(), words()])


@pytest.mark.parametrize("blocks", [2, 9])
def test_a_release_orders_other_threads_only_after_a_barrier(blocks: int) -> None:
    """Every thread stores and one exchanges, perhaps before the others have stored."""
    total = words(128)
    with options(check_races=True):
        compiled = lock_of_many[(blocks,)](words(), total, BLOCK=128, BARRIER=True)
        assert total.tolist() == [blocks] * 128
        released = compiled.asm["ptx"].partition("st.global")[2].partition(".exch")[0]
        if released.count("bar.sync") > 1:
            # Triton 3.9 puts one before every release.
            lock_of_many[(blocks,)](words(), words(128), BLOCK=128, BARRIER=False)
            return
        with pytest.raises(Race, match="total_ptr without order after a write") as caught:
            lock_of_many[(blocks,)](words(), words(128), BLOCK=128, BARRIER=False)
    with open(__file__) as source:
        line = next(i for i, text in enumerate(source, 1) if "# inside" in text)
    assert f"after a write at {__file__}:{line}" in str(caught.value)


HANDED = (
    HEAD
    + """st.global.u32 [%rd0], 7; BARRIER
@%p3 atom.global.release.gpu.exch.b32 %r1, [%rd1], 1; ret;
READ: ld.acquire.gpu.global.u32 %r1, [%rd1];
atom.global.acquire.gpu.add.u32 %r1, [%rd1], 0; setp.eq.u32 %p2, %r1, 0; @%p2 bra READ;
bar.sync 0; ld.global.u32 %r2, [%rd0]; ret; }"""
)


@pytest.mark.parametrize(
    ("barrier", "threads", "right"),
    [
        ("", 1, True),
        ("", 32, False),
        ("", 64, False),
        ("bar.warp.sync -1;", 32, True),
        ("bar.warp.sync -1;", 64, False),
        ("bar.sync 0;", 64, True),
        ("bar.sync 1, 64;", 64, True),
        ("bar.sync 1, 64;", 96, None),
    ],
)
def test_each_kind_of_barrier_before_a_release_orders_whom_it_joins(
    barrier: str, threads: int, right: bool | None
) -> None:
    text, shape = HANDED.replace("BARRIER", barrier), [words(threads), words()]
    if right is None:  # the third warp stores, and meets neither of the others
        text = text.replace(
            "bar.sync 1, 64;", "setp.ge.u32 %p4, %r3, 64; @%p4 ret; bar.sync 1, 64;"
        )
    with options(check_races=True):
        if right:
            run_ptx(text, "k", (2,), (threads,), shape)
            return
        with pytest.raises(Race, match="read of 4 bytes of argument 0 without order after a write"):
            run_ptx(text, "k", (2,), (threads,), shape)


@triton.jit
def in_place_then_more(x_ptr, y_ptr, out_ptr, N: tl.constexpr, M: tl.constexpr):
    """Fewer elements of x than threads: some threads compute what others store."""
    at, more = tl.arange(0, N), tl.arange(0, M)
    x = tl.load(x_ptr + at)
    tl.store(x_ptr + at, x + 1)
    tl.store(out_ptr + more, tl.load(y_ptr + more))


def test_a_read_that_nothing_depends_on_is_no_race_though_the_thread_stores() -> None:
    x, y, out = words(32), torch.arange(512, dtype=torch.int32), words(512)
    with options(check_races=True):
        in_place_then_more[(1,)](x, y, out, N=32, M=512)
    assert torch.equal(out, y)
    assert x.tolist() == [1] * 32


DEPENDS = """.version 8.7
.target sm_90
.address_size 64
.visible .entry k(.param .u64 x, .param .u64 out) {
.reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<5>;
ld.param.u64 %rd0, [x]; ld.param.u64 %rd1, [out]; mov.u32 %r0, %tid.x;
mul.wide.u32 %rd2, %r0, 4; add.u64 %rd1, %rd1, %rd2; setp.eq.u32 %p1, %r0, 0;
ld.global.u32 %r1, [%rd0]; mov.u32 %r2, 5;
@%p1 st.global.u32 [%rd0], 9;
AFTER
ret; }"""


@pytest.mark.parametrize(
    ("after", "right"),
    [
        ("", True),
        ("st.global.u32 [%rd1], %r2;", True),
        ("st.global.u32 [%rd1], %r1;", False),
        ("add.u32 %r3, %r1, %r0; xor.b32 %r4, %r3, 1; st.global.u32 [%rd1], %r4;", False),
        ("st.global.u32 [%rd1], %r2; st.global.u32 [%rd1], %r1;", False),
        ("setp.eq.u32 %p2, %r1, 3; @%p2 st.global.u32 [%rd1], %r2;", True),
        ("setp.ne.u32 %p2, %r1, 3; @%p2 st.global.u32 [%rd1], %r2;", False),
        ("setp.eq.u32 %p2, %r1, 3; @%p2 bra END; st.global.u32 [%rd1], %r2; END:", False),
        (".local .b32 own; st.local.u32 [own], %r1; ld.local.u32 %r2, [own];"
         "st.global.u32 [%rd1], %r2;", False),
        ("and.b32 %r3, %r1, 0; cvt.u64.u32 %rd3, %r3; add.u64 %rd1, %rd1, %rd3;"
         "st.global.u32 [%rd1], %r2;", False),
    ],
)  # fmt: skip
def test_a_read_races_if_a_value_an_address_a_guard_or_a_path_depends_on_it(
    after: str, right: bool
) -> None:
    """A guarded store that no thread makes is none."""
    with options(check_races=True):
        if right:
            run_ptx(DEPENDS.replace("AFTER", after), "k", (1,), (64,), [words(), words(64)])
            return
        with pytest.raises(Race, match="write of 4 bytes of argument 0 without order after a read"):
            run_ptx(DEPENDS.replace("AFTER", after), "k", (1,), (64,), [words(), words(64)])


@pytest.mark.parametrize(
    ("between", "threads", "right"),
    [
        ("", 32, False),
        ("shfl.sync.bfly.b32 %r5, %r1, 1, 31, -1;", 32, True),
        ("add.u32 %r3, %r1, 1; shfl.sync.idx.b32 %r5, %r3, 0, 31, 0xffffffff;", 32, True),
        ("shfl.sync.bfly.b32 %r5, %r1, 1, 31, -1;", 64, False),
        ("shfl.sync.bfly.b32 %r5, %r2, 1, 31, -1;", 32, False),
        ("shfl.sync.bfly.b32 %r5, %r1, 1, 31, -1; bra ON; ON:", 32, False),
    ],
)
def test_a_warp_that_hands_on_what_it_has_read_may_store_there(
    between: str, threads: int, right: bool
) -> None:
    text = DEPENDS.replace("mov.u32 %r2, 5;", f"mov.u32 %r2, 5; {between}")
    text = text.replace("AFTER", "st.global.u32 [%rd1], %r1;")
    with options(check_races=True):
        if right:
            run_ptx(text, "k", (1,), (threads,), [words(), words(threads)])
            return
        with pytest.raises(Race, match="write of 4 bytes of argument 0 without order after a read"):
            run_ptx(text, "k", (1,), (threads,), [words(), words(threads)])
