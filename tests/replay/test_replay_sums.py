"""Sums of atomics whose bits another order of threads would change are shaken, and no others."""

from __future__ import annotations

import pytest
import torch

from twinstep.replay import options, run_ptx

pytestmark = pytest.mark.usefixtures("replay")

KERNEL = """.version 8.7
.target sm_90
.address_size 64
.visible .entry k(.param .u64 x, .param .u64 total) {
.reg .b16 %h<4>; .reg .b32 %r<9>; .reg .f32 %f<4>; .reg .f64 %d<4>; .reg .b64 %rd<9>;
.reg .pred %p<3>;
ld.param.u64 %rd0, [x]; ld.param.u64 %rd1, [total]; mov.u32 %r0, %ctaid.x; mov.u32 %r1, %tid.x;
mov.u32 %r2, %ntid.x; mad.lo.u32 %r3, %r0, %r2, %r1; mul.wide.u32 %rd2, %r3, SIZE;
add.u64 %rd3, %rd0, %rd2;
BODY
ret;
}
"""
ADD = {
    torch.float32: "ld.global.f32 %f0, [%rd3]; red.global.add.f32 [%rd1], %f0;",
    torch.float64: "ld.global.f64 %d0, [%rd3]; atom.global.add.f64 %d1, [%rd1], %d0;",
    torch.float16: "ld.global.b16 %h0, [%rd3]; atom.global.add.noftz.f16 %h1, [%rd1], %h0;",
    torch.bfloat16: "ld.global.b16 %h0, [%rd3]; atom.global.add.noftz.bf16 %h1, [%rd1], %h0;",
}
# Adds a value until nothing has come between the read and the swap.
SWAP = """ld.global.{value}, [%rd3]; ld.relaxed.gpu.global.{bits} {old}, [%rd1];
LOOP: {total}
atom.{order}global.cas.{bits} {seen}, [%rd1], {old}, {new}; setp.ne.{bits} %p1, {seen}, {old};
mov.{bits} {old}, {seen}; @%p1 bra LOOP;"""


WORDS = ("b32", "%r4", "%r5", "%r6")
SWAPS = {
    "f32": (
        torch.float32,
        "f32 %f0",
        *WORDS,
        "mov.b32 %f1, %r4; add.f32 %f2, %f0, %f1; mov.b32 %r5, %f2;",
    ),
    "f32 the other way round": (
        torch.float32,
        "f32 %f0",
        *WORDS,
        "mov.b32 %f1, %r4; add.rn.f32 %f2, %f1, %f0; mov.b32 %r5, %f2;",
    ),
    "fma": (
        torch.float32,
        "f32 %f0",
        *WORDS,
        "mov.b32 %f1, %r4; mov.f32 %f3, 0f3F800000; fma.rn.f32 %f2, %f0, %f3, %f1;"
        "mov.b32 %r5, %f2;",
    ),
    "f64": (
        torch.float64,
        "f64 %d0",
        *("b64", "%rd4", "%rd5", "%rd6"),
        "mov.b64 %d1, %rd4; add.f64 %d2, %d0, %d1; mov.b64 %rd5, %d2;",
    ),
    "f16": (torch.float16, "b16 %h0", "b16", "%h1", "%h2", "%h3", "add.f16 %h2, %h1, %h0;"),
    "bf16": (torch.bfloat16, "b16 %h0", "b16", "%h1", "%h2", "%h3", "add.bf16 %h2, %h1, %h0;"),
}
IN_TURN = """setp.lt.u32 %p0, %r1, 32; @%p0 red.global.add.f32 [%rd1], %f0; bar.sync 0;
@!%p0 red.global.add.f32 [%rd1], %f0;"""
ROUNDED = (1.0, 1 / 3, 1e-3, 0.7)


def swap(kind: str, order: str = "") -> tuple[torch.dtype, str]:
    """The dtype and the loop."""
    dtype, value, bits, old, new, seen, total = SWAPS[kind]
    return dtype, SWAP.format(
        value=value, bits=bits, old=old, new=new, seen=seen, total=total, order=order
    )


def moved(
    values: tuple[float, ...],
    threads: int = 1,
    dtype: torch.dtype = torch.float32,
    start: float = 0.0,
    add: str = "",
) -> bool:
    """True if a sum of these values, one a thread, differs once sums are shaken."""
    body = KERNEL.replace("SIZE", str(dtype.itemsize)).replace("BODY", add or ADD[dtype])
    totals = []
    for shaken in (False, True):
        terms, total = torch.tensor(values, dtype=dtype), torch.full((1,), start, dtype=dtype)
        with options(check_races=True, shake_sums=shaken):
            run_ptx(body, "k", (len(values) // threads,), (threads,), [terms, total])
        totals.append(total)
    return not torch.equal(*totals)


@pytest.mark.parametrize("dtype", ADD, ids=str)
def test_rounded_sum_over_blocks_is_shaken(dtype: torch.dtype) -> None:
    assert moved(ROUNDED, dtype=dtype)


@pytest.mark.parametrize("dtype", ADD, ids=str)
def test_exact_sum_over_blocks_is_not(dtype: torch.dtype) -> None:
    assert not moved((1.0, 2.0, 64.0, 0.5, 0.0), dtype=dtype, start=8.0)


@pytest.mark.parametrize("order", ["", "acq_rel.gpu."])
@pytest.mark.parametrize("kind", SWAPS)
def test_sums_by_compare_and_swap_are_too(kind: str, order: str) -> None:
    dtype, add = swap(kind, order)
    assert moved((*ROUNDED, 0.3), dtype=dtype, add=add)
    assert not moved((1.0, 2.0, 64.0, 0.5, 0.0), dtype=dtype, start=8.0, add=add)
    assert not moved((0.0, 1 / 3, 0.0, 1e-3), dtype=dtype, add=add)


def test_a_maximum_by_compare_and_swap_is_no_sum() -> None:
    dtype, add = swap("f32")
    assert not moved(ROUNDED, dtype=dtype, add=add.replace("add.f32", "max.f32"))
    doubled = add.replace("add.f32 %f2, %f0, %f1", "add.f32 %f2, %f0, %f0")
    assert not moved(ROUNDED, dtype=dtype, add=doubled)


def test_two_terms_commute_and_three_do_not() -> None:
    assert not moved((0.0, 1 / 3, 0.0, 1e-3))
    assert moved((1 / 3, 1e-3), start=0.7)
    assert not moved((1 / 3,), start=0.7)


def test_infinity_and_nan_stay() -> None:
    assert not moved((3e38, 3e38, 1 / 3, 0.7))


def test_within_a_block_warps_have_no_order_and_threads_of_a_warp_do() -> None:
    assert not moved(ROUNDED * 8, threads=32)
    assert moved(ROUNDED * 16, threads=64)


def test_a_barrier_between_warps_is_an_order() -> None:
    add = "ld.global.f32 %f0, [%rd3];\n" + IN_TURN
    assert not moved(ROUNDED * 16, threads=64, add=add)
    assert moved(ROUNDED * 16, threads=64, add=add.replace("bar.sync 0;", ""))


def test_blocks_that_wait_for_one_another_have_an_order() -> None:
    """Each adds when the counter, which moves behind the sum, says its own number."""
    turn = """ld.global.f32 %f0, [%rd3];
    WAIT: atom.global.acquire.gpu.add.u32 %r4, [%rd1+4], 0; setp.ne.u32 %p1, %r4, %r0;
    @%p1 bra WAIT;
    red.global.add.f32 [%rd1], %f0; atom.global.release.gpu.add.u32 %r4, [%rd1+4], 1;"""
    body = KERNEL.replace("SIZE", "4").replace("BODY", turn)
    totals = []
    for shaken in (False, True):
        total = torch.zeros(2)
        with options(check_races=True, shake_sums=shaken):
            run_ptx(body, "k", (4,), (1,), [torch.tensor(ROUNDED), total])
        totals.append(total)
    assert torch.equal(*totals)
