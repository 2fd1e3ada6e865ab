"""Loops without end are stopped and named; long ones go on."""

from __future__ import annotations

from time import process_time

import pytest
import torch
import triton
import triton.language as tl

from twinstep.replay import Deadlock, LimitReached, NoProgress, ReplayError, options, run_ptx
from twinstep.replay.launch.options import Options

HERE = __file__
HEAD = '.version 8.7\n.target sm_90\n.address_size 64\n.file 1 "kernel.py"\n'


def run(body: str, threads: int = 64, blocks: int = 1) -> torch.Tensor:
    """Run a body whose %rd0 is the address of 64 words; %r0 is the thread index."""
    text = f"""{HEAD}.visible .entry k(.param .u64 out) {{
    .reg .b32 %r<20>; .reg .b64 %rd<9>; .reg .pred %p<5>;
    .shared .align 4 .b8 room[256];
    ld.param.u64 %rd0, [out]; mov.u32 %r0, %tid.x;
    .loc 1 5 0
    {body}
    ret; }}"""
    out = torch.zeros(64, dtype=torch.int32)
    run_ptx(text, "k", (blocks,), (threads,), [out])
    return out


TAKE = "AGAIN: atom.global.cas.b32 %r1, [%rd0], 0, 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra AGAIN;"

ENDLESS = {
    "nothing": "AGAIN: bra AGAIN;",
    "a counter that nothing asks for": "AGAIN: add.u32 %r1, %r1, 1; bra AGAIN;",
    "a flag": "AGAIN: ld.volatile.global.u32 %r1, [%rd0]; setp.eq.u32 %p1, %r1, 0; @%p1 bra AGAIN;",
    "a flag with a growing delay": "mov.u32 %r2, 1; AGAIN: nanosleep.u32 %r2; "
    "shl.b32 %r2, %r2, 1; ld.volatile.global.u32 %r1, [%rd0]; setp.eq.u32 %p1, %r1, 0; "
    "@%p1 bra AGAIN;",
    "a lock that is not released": TAKE,
    "a flag in shared memory": "mov.u32 %r2, room; st.shared.u32 [%r2], 0; bar.sync 0; AGAIN: "
    "ld.volatile.shared.u32 %r1, [%r2]; setp.eq.u32 %p1, %r1, 0; @%p1 bra AGAIN;",
    "one thread waits for itself": "setp.ne.u32 %p2, %r0, 3; @%p2 bra END; AGAIN: "
    "ld.volatile.global.u32 %r1, [%rd0]; setp.eq.u32 %p1, %r1, 0; @%p1 bra AGAIN; END:",
    "a value that goes to and fro": "AGAIN: atom.global.xor.b32 %r1, [%rd0], 1; "
    "setp.lt.u32 %p1, %r1, 2; @%p1 bra AGAIN;",
    "a store of the same value again and again": "AGAIN: st.global.u32 [%rd0], 7; bra AGAIN;",
    "a counter in a ring": "AGAIN: add.u32 %r1, %r1, 1; and.b32 %r1, %r1, 7; "
    "setp.ne.u32 %p1, %r1, 9; @%p1 bra AGAIN;",
    "a barrier in the loop": "AGAIN: bar.sync 0; bra AGAIN;",
}


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("checked", [False, True], ids=["", "races"])
def test_an_endless_loop_is_a_fault_with_its_line(name: str, checked: bool) -> None:
    with options(patience=2, check_races=checked), pytest.raises(NoProgress) as caught:
        run(ENDLESS[name])
    assert "kernel k, block (0, 0, 0): " in str(caught.value)
    assert "kernel.py:5" in str(caught.value)


def test_the_watchdog_is_on_by_default_and_needs_a_fraction_of_20_seconds() -> None:
    assert Options().patience == 20
    started = process_time()
    with pytest.raises(Deadlock, match="never ends"):
        run(TAKE, blocks=8)
    assert process_time() - started < 10


@pytest.mark.parametrize(
    "body",
    [
        "AGAIN: add.u32 %r1, %r1, 2; setp.ne.u32 %p1, %r1, 7; @%p1 bra AGAIN;",
        "AGAIN: atom.global.add.u32 %r1, [%rd0], 2; setp.ne.u32 %p1, %r1, 7; @%p1 bra AGAIN;",
    ],
    ids=["a register that passes its bound by", "a word that passes its bound by"],
)
def test_a_loop_that_may_end_some_day_is_a_limit_and_no_fault(body: str) -> None:
    with options(patience=1), pytest.raises(LimitReached, match="no fault of the kernel") as caught:
        run(body)
    assert (caught.value.construct, caught.value.place) == ("time", "kernel.py:5")


def test_steps_can_be_limited() -> None:
    with options(max_steps=500), pytest.raises(LimitReached, match="500 steps") as caught:
        run("AGAIN: add.u32 %r1, %r1, 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra AGAIN;")
    assert caught.value.construct == "steps"


def test_a_long_loop_that_reads_on_and_on_goes_on() -> None:
    """It takes several times its patience, and every look finds other memory touched."""
    count = 200_000
    text = f"""{HEAD}.visible .entry k(.param .u64 x, .param .u64 out) {{
    .reg .b32 %r<20>; .reg .b64 %rd<9>; .reg .pred %p<5>;
    ld.param.u64 %rd0, [x]; ld.param.u64 %rd1, [out]; mov.u32 %r1, 0; mov.u32 %r2, 0;
    AGAIN: ld.global.u32 %r3, [%rd0]; add.u32 %r1, %r1, %r3; add.u64 %rd0, %rd0, 4;
    add.u32 %r2, %r2, 1; setp.ne.u32 %p1, %r2, {count}; @%p1 bra AGAIN;
    st.global.u32 [%rd1], %r1; ret; }}"""
    x, out = torch.arange(count, dtype=torch.int32) % 7, torch.zeros(1, dtype=torch.int32)
    started = process_time()
    with options(patience=0.1):
        run_ptx(text, "k", (1,), (1,), [x, out])
    assert out.item() == x.sum().item()
    assert process_time() - started > 0.3


@triton.jit
def add_in_turn(lock_ptr, total_ptr):
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(total_ptr, tl.load(total_ptr) + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


@triton.jit
def never_released(lock_ptr, total_ptr):
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:  # waits for ever
        pass
    tl.store(total_ptr, tl.load(total_ptr) + 1)


@pytest.mark.usefixtures("replay")
def test_programs_that_take_turns_at_a_lock_are_not_stopped() -> None:
    lock, total = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with options(patience=0.3):
        add_in_turn[(40,)](lock, total)
    assert (lock.item(), total.item()) == (0, 40)


@pytest.mark.usefixtures("replay")
def test_a_lock_that_triton_never_releases_is_a_fault_with_its_line() -> None:
    lock, total = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with options(patience=4), pytest.raises(NoProgress) as caught:
        never_released[(4,)](lock, total)
    with open(HERE) as source:
        line = next(i for i, text in enumerate(source, 1) if "# waits for ever" in text)
    assert f"{HERE}:{line}" in str(caught.value)
    assert total.item() == 1


def test_a_failure_of_replay_itself_is_a_limit_with_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from twinstep.replay.machine.execute import Execution

    def failing(self: Execution, pc: int) -> None:
        self.at = pc
        raise MemoryError("no room")

    monkeypatch.setattr(Execution, "_step", failing)
    with pytest.raises(ReplayError, match=r"MemoryError \(no room\), no fault of the kernel"):
        run("")
