"""Volatile accesses within a block: no race by themselves, and no barrier either."""

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
