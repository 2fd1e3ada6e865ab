"""On request, integers divided by zero and NaNs that arise are faults with line and thread."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from twinstep.replay import InvalidArithmetic, options, run_ptx

HEAD = '.version 8.7\n.target sm_100a\n.address_size 64\n.file 1 "kernel.py"\n'


def run(body: str, threads: int = 64) -> None:
    """Run a body with registers of every width; %r0 is the thread index."""
    text = f"""{HEAD}.visible .entry k() {{
    .reg .b16 %h<9>; .reg .b32 %r<9>; .reg .b64 %d<9>; .reg .pred %p<5>;
    mov.u32 %r0, %tid.x;
    .loc 1 5 0
    {body}
    ret; }}"""
    run_ptx(text, "k", (1,), (threads,), [])


BAD = {
    "div.s32": "mov.u32 %r1, 0; div.s32 %r2, %r0, %r1;",
    "rem.u64": "cvt.u64.u32 %d1, %r0; sub.u64 %d1, %d1, 9; rem.u64 %d2, 5, %d1;",
    "div.u16": "cvt.u16.u32 %h1, %r0; sub.u16 %h1, %h1, 9; div.u16 %h2, 5, %h1;",
    "infinities": "mov.b32 %r1, 0f7F800000; sub.f32 %r2, %r1, %r1;",
    "onto itself": "mov.b32 %r1, 0f7F800000; sub.f32 %r1, %r1, %r1;",
    "0/0": "mov.b32 %r1, 0f00000000; div.rn.f32 %r2, %r1, %r1;",
    "root": "mov.b64 %d1, 0dBFF0000000000000; sqrt.rn.f64 %d2, %d1;",
    "logarithm": "mov.b32 %r1, 0fBF800000; lg2.approx.f32 %r2, %r1;",
    "fp16": "mov.b16 %h1, 0x7C00; mov.b16 %h2, 0; mul.f16 %h3, %h1, %h2;",
    "bf16": "mov.b16 %h1, 0x7F80; neg.bf16 %h2, %h1; add.bf16 %h3, %h1, %h2;",
    "low half": "mov.b32 %r1, 0x3C007C00; neg.f16x2 %r2, %r1; add.f16x2 %r3, %r1, %r2;",
    "high half": "mov.b32 %r1, 0x7F803F80; neg.bf16x2 %r2, %r1; add.rn.bf16x2 %r3, %r1, %r2;",
}
GOOD = {
    "numbers": "mov.b32 %r1, 0f7F800000; add.f32 %r2, %r1, %r1; div.s32 %r3, %r0, 7;",
    "a NaN that was there": "mov.b32 %r1, 0f7FC00000; add.f32 %r2, %r1, %r1;",
    "a guarded division": "setp.ne.u32 %p1, %r0, 0; @%p1 div.u32 %r1, 5, %r0;",
    "a guarded infinity": "mov.b32 %r1, 0f7F800000; setp.eq.u32 %p1, %r0, 99; "
    "@%p1 sub.f32 %r2, %r1, %r1;",
    "a division of floats": "mov.b32 %r1, 0f00000000; mov.b32 %r2, 0f3F800000; "
    "div.rn.f32 %r3, %r2, %r1;",
    "a NaN of 8 bits": "mov.b16 %h1, 0x7F00; cvt.rn.f16x2.e4m3x2 %r1, %h1;",
    "an infinity of 8 bits": "mov.b16 %h1, 0x7C7F; cvt.rn.f16x2.e5m2x2 %r1, %h1;",
    "to 8 bits": "mov.b32 %r1, 0f7F800000; cvt.rn.satfinite.e4m3x2.f32 %h1, %r1, %r1;",
    "bits": "mov.b32 %r1, 0f7F800000; or.b32 %r2, %r1, 1;",
}


@pytest.mark.parametrize("name", BAD)
def test_what_goes_wrong_is_named_on_request(name: str) -> None:
    run(BAD[name])
    with options(check_arithmetic=True), pytest.raises(InvalidArithmetic) as caught:
        run(BAD[name])
    first = "(9, 0, 0)" if "%h1, 9" in BAD[name] or "%d1, 9" in BAD[name] else "(0, 0, 0)"
    assert f"kernel k, kernel.py:5, `{BAD[name].split(';')[-2].strip()}`" in str(caught.value)
    assert f"thread {first}" in str(caught.value)


@pytest.mark.parametrize("name", GOOD)
def test_what_is_right_passes(name: str) -> None:
    with options(check_arithmetic=True):
        run(GOOD[name])


@triton.jit
def normalise(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + at, e / tl.sum(e, 0), mask=at < n)


@pytest.mark.usefixtures("replay")
def test_the_line_of_a_triton_kernel_is_named() -> None:
    x, out = torch.randn(100), torch.zeros(100)
    with options(check_arithmetic=True):
        normalise[(1,)](x, out, 100, BLOCK=128)
        torch.testing.assert_close(out, torch.softmax(x, 0))
        with pytest.raises(InvalidArithmetic, match=rf"a NaN arises: .*{__file__}:\d+"):
            normalise[(1,)](torch.full((100,), -float("inf")), out, 100, BLOCK=128)
