"""Hand-written PTX: barriers, divergence, warps, atomics, local memory, calls, and text changes."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from twinstep.replay import (
    Deadlock,
    KernelTrap,
    Misaligned,
    OutOfBounds,
    Race,
    UninitialisedRead,
    UnknownInstruction,
    launches,
    options,
    run_ptx,
)

HEAD = '.version 8.7\n.target sm_90a\n.address_size 64\n.file 1 "kernel.py"\n'


def kernel(body: str, params: str = ".param .u64 out") -> str:
    """A module with one entry `k`; registers %r, %rd, %f, %p and the thread index in %r0."""
    registers = (
        ".reg .b16 %h<9>; .reg .b32 %r<40>; .reg .b64 %rd<20>; .reg .f32 %f<20>; .reg .pred %p<9>;"
    )
    return f"{HEAD}.visible .entry k({params})\n{{\n{registers}\nmov.u32 %r0, %tid.x;\n{body}\n}}\n"


STORE = """
    ld.param.u64 %rd0, [out];
    mov.u32 %r30, %ctaid.x; mov.u32 %r31, %ntid.x; mad.lo.u32 %r32, %r30, %r31, %r0;
    mul.wide.u32 %rd1, %r32, 4; add.u64 %rd0, %rd0, %rd1;
    st.global.u32 [%rd0], %r1;
    ret;
"""
"""Store %r1 of every thread to out[global thread index]."""


def run(body: str, threads: int = 64, blocks: int = 1) -> list[int]:
    """Run a body that leaves its result in %r1 and ends with STORE."""
    out = torch.zeros(blocks * threads, dtype=torch.int32)
    run_ptx(kernel(body + STORE), "k", (blocks,), (threads,), [out])
    return out.tolist()


EXCHANGE = """
    .shared .align 4 .b8 buffer[512];
    mov.u32 %r2, buffer; shl.b32 %r3, %r0, 2; add.u32 %r4, %r2, %r3;
    .loc 1 10 0
    st.shared.u32 [%r4], %r0;
    BARRIER
    xor.b32 %r5, %r3, 252; add.u32 %r5, %r5, %r2;
    .loc 1 12 0
    ld.shared.u32 %r1, [%r5];
"""


def test_threads_see_each_other_after_a_barrier() -> None:
    with options(check_races=True):
        assert run(EXCHANGE.replace("BARRIER", "bar.sync 0;")) == list(range(63, -1, -1))


def test_a_missing_barrier_is_a_race_with_both_lines() -> None:
    with options(check_races=True), pytest.raises(Race) as caught:
        run(EXCHANGE.replace("BARRIER", ""))
    assert "kernel.py:12" in str(caught.value)
    assert "after a write at kernel.py:10" in str(caught.value)


def test_a_barrier_that_some_threads_skip_is_a_deadlock() -> None:
    skip = """setp.lt.u32 %p1, %r0, 7; @%p1 bra AFTER;
    .loc 1 20 0
    bar.sync 0;
    AFTER:"""
    with pytest.raises(Deadlock) as caught:
        run(EXCHANGE.replace("BARRIER", skip))
    assert "57 threads" in str(caught.value)
    assert "kernel.py:20" in str(caught.value)
    assert "7 threads (first (0, 0, 0)) have finished" in str(caught.value)


def test_groups_at_two_barriers_are_a_deadlock_with_both_lines() -> None:
    with pytest.raises(Deadlock) as caught:
        run("""setp.lt.u32 %p1, %r0, 32; @%p1 bra LOW;
        .loc 1 20 0
        bar.sync 1, 64; bra JOIN;
        LOW:
        .loc 1 22 0
        bar.sync 2, 64;
        JOIN: mov.u32 %r1, 0;""")
    assert "32 threads (first (32, 0, 0)) wait at kernel.py:20" in str(caught.value)
    assert "32 threads (first (0, 0, 0)) wait at kernel.py:22" in str(caught.value)


def test_one_barrier_may_stand_at_two_places() -> None:
    body = """setp.lt.u32 %p1, %r0, 32; @%p1 bra LOW;
    bar.sync 0; bra JOIN;
    LOW: bar.sync 0;
    JOIN: mov.u32 %r1, 4;"""
    assert run(body) == [4] * 64


HANDOVER = """
    .shared .align 4 .b8 buffer[4];
    mov.u32 %r2, buffer; shr.u32 %r3, %r0, 5; setp.ne.u32 %p1, %r3, 0; setp.eq.u32 %p3, %r0, 0;
    setp.ge.u32 %p2, %r3, JOINED; @%p2 bra REST;
    .loc 1 10 0
    @%p3 st.shared.u32 [%r2], 5;
    bar.sync 1, COUNT;
    REST:
    .loc 1 12 0
    @%p1 ld.shared.u32 %r1, [%r2];
"""


def handed_over(joined: int, threads: int) -> list[int]:
    """Warp 0 writes, `joined` warps meet at a barrier, all other warps read."""
    body = HANDOVER.replace("JOINED", str(joined)).replace("COUNT", str(32 * joined))
    with options(check_races=True):
        return run(body, threads=threads)


def test_a_barrier_of_some_warps_orders_those() -> None:
    assert handed_over(2, 64)[32:] == [5] * 32
    assert handed_over(3, 96)[32:] == [5] * 64


def test_a_barrier_of_some_warps_orders_no_others() -> None:
    with pytest.raises(Race, match=r"after a write at kernel.py:10.*thread \(64, 0, 0\)"):
        handed_over(2, 96)


def test_a_barrier_within_a_warp_orders_no_other_warp() -> None:
    near = EXCHANGE.replace("xor.b32 %r5, %r3, 252", "xor.b32 %r5, %r3, 4")
    with options(check_races=True):
        assert run(near.replace("BARRIER", "bar.warp.sync -1;")) == [i ^ 1 for i in range(64)]
        with pytest.raises(Race):
            run(EXCHANGE.replace("BARRIER", "bar.warp.sync -1;"))


def test_shared_memory_that_nobody_wrote_is_found_on_request() -> None:
    body = """.shared .align 4 .b8 buffer[4]; mov.u32 %r2, buffer;
    .loc 1 7 0
    ld.shared.u32 %r1, [%r2];"""
    assert run(body) == [0xCDCDCDCD - (1 << 32)] * 64
    with options(uninitialised=[]), pytest.raises(UninitialisedRead, match=r"kernel\.py:7"):
        run(body)


@pytest.mark.parametrize(
    "opcode", ["barrier.cluster.arrive", "barrier.cluster.wait", "bar.arrive 1, 64"]
)
def test_barriers_beyond_the_block_are_refused(opcode: str) -> None:
    with pytest.raises(UnknownInstruction, match=rf"{opcode.split()[0]}.*kernel\.py:5"):
        run(f".loc 1 5 0\n{opcode};")


def test_each_thread_loops_for_its_own_time() -> None:
    body = """
    mov.u32 %r1, 0; mov.u32 %r2, %r0;
    LOOP: setp.eq.u32 %p1, %r2, 0; @%p1 bra END;
    add.u32 %r1, %r1, %r2; sub.u32 %r2, %r2, 1; bra LOOP;
    END:"""
    assert run(body) == [i * (i + 1) // 2 for i in range(64)]


def test_paths_join_again_before_a_shuffle() -> None:
    body = """
    and.b32 %r2, %r0, 1; setp.eq.u32 %p1, %r2, 0; @%p1 bra EVEN;
    mul.lo.u32 %r3, %r0, 10; bra JOIN;
    EVEN: mul.lo.u32 %r3, %r0, 100;
    JOIN: shfl.sync.bfly.b32 %r1, %r3, 1, 31, -1;"""
    values = [i * (100 if i % 2 == 0 else 10) for i in range(64)]
    assert run(body) == [values[i ^ 1] for i in range(64)]


def test_a_spinning_thread_lets_the_one_it_waits_for_run() -> None:
    body = """
    .shared .align 4 .b8 flag[4];
    mov.u32 %r2, flag; mov.u32 %r3, 0; st.shared.u32 [%r2], %r3; bar.sync 0;
    setp.eq.u32 %p1, %r0, 63; @%p1 bra SET;
    WAIT: ld.volatile.shared.u32 %r4, [%r2]; setp.eq.u32 %p2, %r4, 0; @%p2 bra WAIT;
    bra DONE;
    SET: mov.u32 %r3, 5; st.shared.u32 [%r2], %r3;
    DONE: ld.shared.u32 %r1, [%r2];"""
    assert run(body) == [5] * 64


@pytest.mark.parametrize(
    ("shuffle", "source"),
    [
        ("up.b32 %r1|%p1, %r0, 3, 0, -1", lambda i: i - 3 if i >= 3 else i),
        ("down.b32 %r1|%p1, %r0, 3, 31, -1", lambda i: i + 3 if i < 29 else i),
        ("bfly.b32 %r1|%p1, %r0, 5, 31, -1", lambda i: i ^ 5),
        ("idx.b32 %r1|%p1, %r0, 7, 31, -1", lambda i: 7),
        ("idx.b32 %r1|%p1, %r0, 2, 0x1c1f, -1", lambda i: i & 28 | 2),
        ("down.b32 %r1|%p1, %r0, 2, 0x181f, -1", lambda i: i + 2 if i % 8 < 6 else i),
    ],
)
def test_shuffles_read_the_lane_they_name(shuffle: str, source: object) -> None:
    assert callable(source)
    assert run(f"shfl.sync.{shuffle};") == [32 * (i // 32) + source(i % 32) for i in range(64)]


@pytest.mark.parametrize(
    ("vote", "wanted"),
    [
        ("vote.sync.ballot.b32 %r1, %p1, -1;", 0x88888888 - (1 << 32)),
        ("vote.sync.any.pred %p2, %p1, -1; selp.u32 %r1, 1, 0, %p2;", 1),
        ("vote.sync.all.pred %p2, %p1, -1; selp.u32 %r1, 1, 0, %p2;", 0),
        ("vote.sync.uni.pred %p2, %p1, -1; selp.u32 %r1, 1, 0, %p2;", 0),
        ("vote.sync.any.pred %p2, !%p1, 0x8; selp.u32 %r1, 1, 0, %p2;", 0),
        ("activemask.b32 %r1;", -1),
        ("redux.sync.add.u32 %r1, %r2, -1;", 48),
        ("redux.sync.max.s32 %r1, %r2, -1;", 3),
        ("redux.sync.xor.b32 %r1, %r2, 0xF;", 0),
        ("elect.sync %r1|%p2, -1;", 0),
    ],
)
def test_votes_and_reductions_see_the_whole_warp(vote: str, wanted: int) -> None:
    body = f"and.b32 %r2, %r0, 3; setp.eq.u32 %p1, %r2, 3; {vote}"
    assert run(body)[:4] == [wanted] * 4


def test_match_finds_equal_values() -> None:
    body = "and.b32 %r2, %r0, 7; match.any.sync.b32 %r1, %r2, -1;"
    masks = [sum(1 << j for j in range(32) if j % 8 == i % 8) for i in range(64)]
    assert run(body) == [m - (1 << 32) if m >> 31 else m for m in masks]


def test_bar_red_counts_over_the_block() -> None:
    body = "setp.lt.u32 %p1, %r0, 13; bar.red.popc.u32 %r1, 0, %p1;"
    assert run(body) == [13] * 64


ATOMICS = [
    ("add.u32", "1", lambda old, arg: old + 1),
    ("min.s32", "%r0", min),
    ("max.u32", "%r0", max),
    ("exch.b32", "%r0", lambda old, arg: arg),
    ("inc.u32", "5", lambda old, arg: 0 if old >= 5 else old + 1),
    ("dec.u32", "5", lambda old, arg: 5 if old == 0 or old > 5 else old - 1),
    ("xor.b32", "%r0", lambda old, arg: old ^ arg),
]


@pytest.mark.parametrize(("operation", "argument", "update"), ATOMICS)
@pytest.mark.parametrize("start", [0, 20])
def test_atomics_take_turns(operation: str, argument: str, update: object, start: int) -> None:
    assert callable(update)
    body = f"ld.param.u64 %rd2, [cell]; atom.global.{operation} %r1, [%rd2], {argument};"
    text = kernel(body + STORE, ".param .u64 out, .param .u64 cell")
    out, cell = torch.zeros(64, dtype=torch.int32), torch.tensor([start], dtype=torch.int32)
    run_ptx(text, "k", (1,), (64,), [out, cell])
    value, found = start, []
    for thread in range(64):
        found.append(value)
        value = update(value, thread)
    assert out.tolist() == found
    assert cell.item() == value


def test_compare_and_swap_makes_a_lock() -> None:
    body = """
    ld.param.u64 %rd2, [cell]; add.u64 %rd3, %rd2, 4;
    AGAIN: atom.global.cas.b32 %r2, [%rd2], 0, 1;
    setp.ne.u32 %p1, %r2, 0; @%p1 bra AGAIN;
    ld.global.u32 %r1, [%rd3]; add.u32 %r3, %r1, 1; st.global.u32 [%rd3], %r3;
    atom.global.exch.b32 %r4, [%rd2], 0;"""
    text = kernel(body + STORE, ".param .u64 out, .param .u64 cell")
    out, cell = torch.zeros(16, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    run_ptx(text, "k", (1,), (16,), [out, cell])
    assert cell.tolist() == [0, 16]
    assert sorted(out.tolist()) == list(range(16))


def test_float_atomics_add_in_thread_order() -> None:
    values = torch.randn(1000)
    body = """
    ld.param.u64 %rd2, [cell]; ld.param.u64 %rd3, [out]; mul.wide.u32 %rd4, %r0, 4;
    add.u64 %rd3, %rd3, %rd4; ld.global.f32 %f1, [%rd3]; red.global.add.f32 [%rd2], %f1; ret;"""
    cell = torch.zeros(1)
    run_ptx(kernel(body, ".param .u64 out, .param .u64 cell"), "k", (1,), (1000,), [values, cell])
    total = np.float32(0)
    for value in values.numpy():
        total = np.float32(total + value)
    assert cell.item() == total


def test_local_arrays_belong_to_one_thread() -> None:
    body = """
    .local .align 8 .b8 depot[32];
    mov.u64 %rd5, depot; cvta.local.u64 %rd6, %rd5;
    mov.u32 %r2, 0;
    FILL: mul.wide.u32 %rd7, %r2, 4; add.u64 %rd8, %rd6, %rd7; mad.lo.u32 %r3, %r2, %r0, %r2;
    st.u32 [%rd8], %r3; add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 8; @%p1 bra FILL;
    and.b32 %r4, %r0, 7; mul.wide.u32 %rd7, %r4, 4; add.u64 %rd8, %rd5, %rd7;
    ld.local.u32 %r1, [%rd8];"""
    assert run(body) == [(i & 7) * (i + 1) for i in range(64)]


def test_an_indirect_branch_takes_its_label() -> None:
    body = """
    and.b32 %r2, %r0, 3;
    TABLE: .branchtargets A, B, C, D;
    brx.idx %r2, TABLE;
    A: mov.u32 %r1, 10; bra E; B: mov.u32 %r1, 20; bra E; C: mov.u32 %r1, 30; bra E;
    D: mov.u32 %r1, 40;
    E:"""
    assert run(body) == [10 * (i % 4 + 1) for i in range(64)]


def test_carries_chain_through_the_flag() -> None:
    body = """
    mov.u32 %r2, 0xFFFFFFF0; mov.u32 %r3, 7;
    add.cc.u32 %r4, %r2, %r0; addc.u32 %r1, %r3, 0;"""
    assert run(body) == [7 + (0xFFFFFFF0 + i >> 32) for i in range(64)]


def test_a_trap_names_the_first_thread() -> None:
    with pytest.raises(KernelTrap, match=r"thread \(9, 0, 0\)"):
        run("setp.ge.u32 %p1, %r0, 9; @%p1 trap; mov.u32 %r1, 0;")


def test_an_unknown_instruction_is_named_with_kernel_and_line() -> None:
    with pytest.raises(UnknownInstruction, match=r"wgmma.*kernel k, kernel\.py:33"):
        run(".loc 1 33 0\nwgmma.fence.sync.aligned;")


def test_an_unknown_modifier_is_not_ignored() -> None:
    with pytest.raises(UnknownInstruction, match="shiny"):
        run("add.shiny.f32 %f1, %f2, %f3;")


def test_an_unknown_special_register_is_named() -> None:
    with pytest.raises(UnknownInstruction, match="%clock"):
        run("mov.u32 %r1, %clock;")


def test_shared_memory_has_bounds_and_alignment() -> None:
    with pytest.raises(OutOfBounds, match="shared write of 4 bytes at offset 512 of 512"):
        run(EXCHANGE.replace("BARRIER", ""), threads=160)
    with pytest.raises(Misaligned):
        run(EXCHANGE.replace("BARRIER", "").replace("[%r4]", "[%r4+2]"))


def test_barriers_and_shared_bytes_are_counted() -> None:
    with launches() as log:
        run(EXCHANGE.replace("BARRIER", "bar.sync 0;"), blocks=3)
    assert log[0].barriers == 3 * 64
    assert log[0].shared_read == log[0].shared_written == 3 * 64 * 4


MIXED = """
    cvt.rn.f32.u32 %f1, %r0; mul.rn.f32 %f2, %f1, 0f3DCCCCCD; add.rn.f32 %f3, %f2, 0f3F800000;
    mov.b32 %r2, %f3; shr.u32 %r3, %r2, 3; xor.b32 %r4, %r3, %r0; and.b32 %r5, %r0, 3;
    setp.lt.u32 %p1, %r5, 2; @%p1 bra LOW;
    add.u32 %r4, %r4, 77;
    LOW: mov.b32 {%h1, %h2}, %r4; mov.b32 %r1, {%h2, %h1};
"""


def test_renamed_registers_change_nothing() -> None:
    renamed = re.sub(r"%r(\d+)", lambda m: f"%r{39 - int(m[1])}", kernel(MIXED + STORE))
    out = torch.zeros(64, dtype=torch.int32)
    run_ptx(renamed, "k", (1,), (64,), [out])
    assert out.tolist() == run(MIXED)


def test_reordered_independent_instructions_change_nothing() -> None:
    moved = MIXED.replace("and.b32 %r5, %r0, 3;", "")
    moved = moved.replace("cvt.rn.f32.u32", "and.b32 %r5, %r0, 3; cvt.rn.f32.u32", 1)
    assert moved != MIXED
    assert run(moved) == run(MIXED)


def test_split_blocks_change_nothing() -> None:
    statements = [s for s in MIXED.replace("LOW:", ";LOW:").split(";") if s.strip()]
    split = ";".join(
        s if s.strip().startswith("LOW") or "@" in s else f"\nbra N{i}; N{i}: {s}"
        for i, s in enumerate(statements)
    )
    assert run(split + ";") == run(MIXED)


def test_a_nested_scope_has_its_own_registers() -> None:
    body = "mov.u32 %r1, 5; { .reg .b32 %r1; mov.u32 %r1, 9; add.u32 %r2, %r1, 1; }"
    assert run(body) == [5] * 64
