"""Volatile accesses: no race by themselves, and no barrier either; nor do they find a total."""

from __future__ import annotations

import pytest
import torch

from twinstep.replay import Race, options, run_ptx

HEAD = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out)
{
.reg .b32 %r<20>; .reg .b64 %rd<4>; .reg .pred %p<4>;
.shared .align 4 .b8 words[512];
ld.param.u64 %rd0, [out]; mov.u32 %r0, %tid.x; mul.wide.u32 %rd1, %r0, 4; add.u64 %rd0, %rd0, %rd1;
mov.u32 %r1, words; shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2;
"""
TAIL = "st.global.u32 [%rd0], %r4; ret; }"
OWN = "st.volatile.shared.u32 [%r3], %r0;"
# The thread 16 further on, and half a block further on.
NEAR = "xor.b32 %r5, %r2, 64; add.u32 %r5, %r5, %r1;"
FAR = "xor.b32 %r5, %r2, 128; add.u32 %r5, %r5, %r1;"
READ = "ld.volatile.shared.u32 %r4, [%r5];"
ADD = f"""ld.volatile.shared.u32 %r6, [%r3]; {READ} WARP add.u32 %r4, %r4, %r6;
st.volatile.shared.u32 [%r3], %r4; WARP"""


def judge(body: str, right: bool) -> list[int]:
    """Run a body of two warps that leaves its result in %r4, with the check of races."""
    out = torch.zeros(64, dtype=torch.int32)
    with options(check_races=True):
        if right:
            run_ptx(HEAD + body + TAIL, "k", (1,), (64,), [out])
        else:
            with pytest.raises(Race, match="of shared memory without order after a"):
                run_ptx(HEAD + body + TAIL, "k", (1,), (64,), [out])
    return out.tolist()


def test_warps_that_exchange_need_a_barrier_of_the_block() -> None:
    for barrier in ("", "bar.warp.sync -1;"):
        judge(f"{OWN} {FAR} {barrier} {READ}", right=False)
    assert judge(f"{OWN} {FAR} bar.sync 0; {READ}", right=True) == [i ^ 32 for i in range(64)]


def test_threads_of_a_warp_do_not_add_up_in_step() -> None:
    start = f"{OWN} {NEAR} bar.warp.sync -1;"
    judge(f"{start} {ADD.replace('WARP', '')}", right=False)
    once = judge(f"{start} {ADD.replace('WARP', 'bar.warp.sync -1;')}", right=True)
    assert once == [i + (i ^ 16) for i in range(64)]


def test_a_loop_over_distances_waits_for_nothing() -> None:
    """Sums that are added up do not decide when the loop ends."""
    step = ADD.replace("WARP", "")
    loop = f"mov.u32 %r7, 0; AGAIN: {step} add.u32 %r7, %r7, 1; setp.lt.u32 %p1, %r7, 2;"
    judge(f"{OWN} {NEAR} bar.warp.sync -1; {loop} @%p1 bra AGAIN;", right=False)


def test_a_flag_that_a_loop_awaits_is_no_race() -> None:
    raised = "setp.ne.u32 %p1, %r0, 0; @%p1 bra WAIT; st.volatile.shared.u32 [%r1+256], 5;"
    first = "@%p1 bra FIRST; st.volatile.shared.u32 [%r1+256], 0; FIRST: bar.sync 0;"
    wait = "WAIT: ld.volatile.shared.u32 %r4, [%r1+256]; setp.eq.u32 %p2, %r4, 0; @%p2 bra WAIT;"
    assert judge(f"setp.ne.u32 %p1, %r0, 0; {first} {raised} {wait}", right=True) == [5] * 64


def test_what_is_compared_and_not_stored_may_be_old() -> None:
    """An early exit, whichever thread raised the flag."""
    body = """st.volatile.shared.u32 [%r1], 0; bar.sync 0; ld.volatile.shared.u32 %r6, [%r1];
    mov.u32 %r4, 7; setp.ne.u32 %p1, %r6, 0; @%p1 bra DONE; st.volatile.shared.u32 [%r1], 3; DONE:
    """
    assert judge(body, right=True) == [7] * 64


TOTAL = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 total, .param .u64 out)
{
.reg .b32 %r<9>; .reg .b64 %rd<4>; .reg .pred %p<4>;
ld.param.u64 %rd0, [total]; ld.param.u64 %rd1, [out]; mov.u32 %r0, %ctaid.x;
"""
ADDS = "atom.ORDER.gpu.global.add.u32 %r1, [%rd0], 1;"
READS = "ld.HOW.global.u32 %r2, [%rd0];"
STORES = "st.global.u32 [%rd1], %r2;"
# The block that draws the last of eight tickets, behind a fence, goes on.
LAST = """membar.gl; atom.relaxed.gpu.global.add.u32 %r3, [%rd0+4], 1; membar.gl;
setp.ne.u32 %p1, %r3, 7; @%p1 ret;"""


def total(body: str, **settings: object) -> list[int]:
    """Run a body of eight blocks of one thread each, with the check of races; what it stores."""
    words, out = torch.zeros(2, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    with options(check_races=True, **settings):  # type: ignore[arg-type]
        run_ptx(TOTAL + body + "ret; }", "k", (8,), (1,), [words, out])
    return out.tolist()


@pytest.mark.parametrize("order", ["relaxed", "acq_rel"])
@pytest.mark.parametrize("how", ["volatile", "relaxed.gpu"])
def test_a_total_that_other_blocks_still_add_to_is_no_total(order: str, how: str) -> None:
    """Blocks in step store equal values; on a GPU each stores what it happens to find."""
    body = f"{ADDS} {READS} {STORES}".replace("ORDER", order).replace("HOW", how)
    for store in (STORES, "st.relaxed.gpu.global.u32 [%rd1], %r2;"):
        with pytest.raises(Race, match="read of 4 bytes of argument 0 without order after a atom"):
            total(body.replace(STORES, store))


def test_blocks_one_by_one_show_a_total_that_is_acquired_too_early() -> None:
    """In step the load acquires what all blocks have added; one by one, the next adds later."""
    for read in (READS.replace("HOW", "acquire.gpu"), "atom.global.add.u32 %r2, [%rd0], 0;"):
        body = f"{ADDS} {read} {STORES}".replace("ORDER", "acq_rel")
        with pytest.raises(Race, match="without order after a"):
            total(body, together=1)


def test_the_last_block_finds_the_total() -> None:
    for how in ("volatile", "relaxed.gpu", "acquire.gpu"):
        body = f"{ADDS} {LAST} {READS} {STORES}".replace("ORDER", "relaxed").replace("HOW", how)
        assert total(body)[0] == total(body, together=1)[0] == 8


def test_a_look_before_an_atomic_is_no_race() -> None:
    """A maximum that is raised already need not be raised again."""
    look = "ld.volatile.global.u32 %r2, [%rd0]; setp.gt.u32 %p1, %r0, %r2;"
    body = f"{look} @%p1 red.relaxed.gpu.global.max.u32 [%rd0], %r0;"
    assert total(body) == total(body, together=1)


def test_a_loop_that_waits_for_all_blocks_is_no_race() -> None:
    wait = f"{ADDS} AGAIN: {READS} setp.lt.u32 %p1, %r2, 8; @%p1 bra AGAIN; {STORES}"
    assert total(wait.replace("ORDER", "relaxed").replace("HOW", "volatile"))[0] == 8
