"""Device functions that were not inlined: modules with several of them, and calls of them."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import twinstep.replay
from twinstep.replay import CannotReplay, KernelTrap, Race, options, run_ptx
from twinstep.replay.ptx.parse import parse
from twinstep.replay.shadow64.lift import lifting

HEAD = '.version 8.7\n.target sm_90\n.address_size 64\n.file 1 "kernel.py"\n'


def function(name: str, body: str, params: str = "", results: str = "") -> str:
    """A device function with registers of its own, of the same names everywhere."""
    registers = ".reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<5>;"
    head = f"({results}) " if results else ""
    return f".func {head}{name}({params})\n{{\n{registers}\n{body}\nret;\n}}\n"


def run(body: str, functions: str, threads: int = 64) -> list[int]:
    """Run functions and a kernel that stores its %r1; %r0 is the thread index."""
    text = f"""{HEAD}{functions}
    .visible .entry k(.param .u64 out) {{
    .reg .b32 %r<20>; .reg .b64 %rd<9>; .reg .pred %p<5>;
    mov.u32 %r0, %tid.x;
    {body}
    ld.param.u64 %rd0, [out];
    mul.wide.u32 %rd1, %r0, 4; add.u64 %rd0, %rd0, %rd1; st.global.u32 [%rd0], %r1;
    ret; }}"""
    out = torch.zeros(threads, dtype=torch.int32)
    run_ptx(text, "k", (1,), (threads,), [out])
    return out.tolist()


def call(name: str, argument: str, result: str, guard: str = "") -> str:
    """A call of a function from u32 to u32."""
    return f"""{{
    .param .b32 param0; .param .b32 retval0;
    st.param.b32 [param0], {argument};
    {guard} call.uni (retval0), {name}, (param0);
    ld.param.b32 {result}, [retval0];
    }}"""


ARGUMENTS = (".param .b32 a", ".param .b32 r")
SQUARE = function(
    "square", "ld.param.b32 %r1, [a]; mul.lo.u32 %r1, %r1, %r1; st.param.b32 [r], %r1;", *ARGUMENTS
)
PLUS = function(
    "square_plus_5",
    f"ld.param.b32 %r1, [a]; {call('square', '%r1', '%r2')} add.u32 %r2, %r2, 5;"
    "st.param.b32 [r], %r2;",
    *ARGUMENTS,
)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_a_module_may_hold_any_number_of_functions(count: int) -> None:
    """Their own variables are theirs, and module variables between them are found."""
    functions = "".join(
        f".global .align 4 .u32 g{i} = {i};\n"
        + function(f"f{i}", ".shared .align 4 .b8 own[4]; mov.u32 %r1, 3;")
        for i in range(count)
    )
    assert run("mov.u32 %r1, %r0;", functions) == list(range(64))
    module = parse(HEAD + functions)
    assert [v.name for v in module.variables] == [f"g{i}" for i in range(count)]
    assert sorted(module.functions) == [f"f{i}" for i in range(count)]


def test_functions_call_functions() -> None:
    body = f"{call('square_plus_5', '%r0', '%r1')} {call('square', '%r1', '%r1')}"
    assert run(body, SQUARE + PLUS) == [(i * i + 5) ** 2 for i in range(64)]
    declared = ".func (.param .b32 r) square (.param .b32 a) ;\n"
    assert run(body, declared + PLUS + SQUARE) == [(i * i + 5) ** 2 for i in range(64)]


def test_a_call_may_be_guarded_and_a_function_may_return_early() -> None:
    early = function(
        "early",
        """.reg .b32 %keep; ld.param.b32 %r1, [a]; mov.u32 %r2, 1000; st.param.b32 [r], %r2;
        setp.lt.u32 %p1, %r1, 10; @%p1 ret; setp.ge.u32 %p2, %r1, 20; @%p2 bra LAST;
        st.param.b32 [r], %r1; ret; LAST: mov.u32 %r2, 7; st.param.b32 [r], %r2;""",
        *ARGUMENTS,
    )
    wanted = [1000 if i < 10 else i if i < 20 else 7 for i in range(64)]
    assert run(call("early", "%r0", "%r1"), early) == wanted
    guarded = """setp.lt.u32 %p3, %r0, 30; mov.u32 %r1, 5;
    { .param .b32 p; .param .b32 q; st.param.b32 [p], %r0; st.param.b32 [q], 5;
    @%p3 call (q), early, (p); ld.param.b32 %r1, [q]; }"""
    assert run(guarded, early) == [w if i < 30 else 5 for i, w in enumerate(wanted)]


def test_a_function_is_called_in_a_loop_and_has_memory_of_its_own() -> None:
    adder = function(
        "add_up",
        """.local .align 8 .b8 depot[16]; mov.u64 %rd1, depot; cvta.local.u64 %rd2, %rd1;
        ld.param.b32 %r1, [a]; st.u32 [%rd2+4], %r1; ld.local.u32 %r2, [%rd1+4];
        shl.b32 %r2, %r2, 1; st.param.b32 [r], %r2;""",
        *ARGUMENTS,
    )
    loop = f"""mov.u32 %r1, 1; and.b32 %r2, %r0, 7; AGAIN: setp.eq.u32 %p1, %r2, 0; @%p1 bra END;
    {call("add_up", "%r1", "%r1")} sub.u32 %r2, %r2, 1; bra AGAIN; END:"""
    assert run(loop, adder) == [2 ** (i % 8) for i in range(64)]


def test_structures_go_in_and_come_back() -> None:
    swap = """.func (.param .align 8 .b8 r[16]) swap(.param .align 8 .b8 a[16])
    { .reg .b64 %rd<5>; ld.param.v2.b64 {%rd1, %rd2}, [a]; st.param.b64 [r], %rd2;
    st.param.b64 [r+8], %rd1; ret; }
    """
    body = """{ .param .align 8 .b8 p[16]; .param .align 8 .b8 q[16];
    cvt.u64.u32 %rd1, %r0; add.u64 %rd2, %rd1, 100;
    st.param.v2.b64 [p], {%rd1, %rd2}; call (q), swap, (p); ld.param.b64 %rd3, [q];
    ld.param.b64 %rd4, [q+8]; sub.u64 %rd3, %rd3, %rd4; cvt.u32.u64 %r1, %rd3; }"""
    assert run(body, swap) == [100] * 64


def test_barriers_and_shared_memory_inside_a_function() -> None:
    exchange = function(
        "exchange",
        """.shared .align 4 .b8 room[256]; mov.u32 %r1, room; ld.param.b32 %r2, [a];
        .loc 1 7 0
        shl.b32 %r3, %r2, 2; add.u32 %r4, %r1, %r3; st.shared.u32 [%r4], %r2;
        BARRIER xor.b32 %r3, %r3, 252; add.u32 %r4, %r1, %r3; ld.shared.u32 %r5, [%r4];
        st.param.b32 [r], %r5;""",
        *ARGUMENTS,
    )
    with options(check_races=True):
        reversed_ = run(call("exchange", "%r0", "%r1"), exchange.replace("BARRIER", "bar.sync 0;"))
        assert reversed_ == list(range(63, -1, -1))
        with pytest.raises(Race, match=r"kernel\.py:7"):
            run(call("exchange", "%r0", "%r1"), exchange.replace("BARRIER", ""))


def test_a_fault_inside_a_function_is_named_with_its_line() -> None:
    trap = function("fail", ".loc 1 9 0\ntrap;")
    with pytest.raises(KernelTrap, match=r"kernel k, kernel\.py:9"):
        run("call fail; mov.u32 %r1, 0;", trap)


@pytest.mark.parametrize(
    ("body", "functions", "construct"),
    [
        (call("square", "%r0", "%r1"), SQUARE.replace("mul.lo", "mul.odd"), "mul.odd.u32"),
        (call("square", "%r0", "%r1"), SQUARE.replace(".param .b32 a", ".param .b64 a"), "call"),
        (call("square", "%r0", "%r1"), SQUARE.replace(".param .b32 a", ".reg .b32 a"), ".param"),
        (call("%rd1", "%r0", "%r1"), SQUARE, "indirect call"),
        (
            call("square_plus_5", "%r0", "%r1"),
            PLUS.replace("square,", "square_plus_5,"),
            "recursion",
        ),
        (
            call("square", "%r0", "%r1"),
            SQUARE.replace("ld.param.b32 %r1, [a];", "mov.b64 %rd1, a; ld.param.b32 %r1, [%rd1];"),
            "call",
        ),
    ],
)
def test_what_no_call_can_do_here_is_refused(body: str, functions: str, construct: str) -> None:
    with pytest.raises(CannotReplay, match="no fault of the kernel") as caught:
        run(body, functions)
    assert caught.value.construct == construct


@triton.jit(noinline=True)
def scaled(x, y):
    return x * y + 1.0


@triton.jit(noinline=True)
def scaled_twice(x, n):
    for _ in range(n):
        x = scaled(x, x)
    return x


@triton.jit
def not_inlined(x_ptr, out_ptr, n):
    x = tl.load(x_ptr + tl.program_id(0))
    tl.store(out_ptr + tl.program_id(0), scaled_twice(x, n) + scaled(x, 3.0))


@triton.jit
def sine(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.sin(tl.load(x_ptr + at)))


@pytest.mark.usefixtures("replay")
@pytest.mark.parametrize("n", [2, 3])
def test_functions_of_triton_that_are_not_inlined(n: int) -> None:
    x, out = torch.randn(9), torch.zeros(9)
    with lifting([x, out]) as lift, options(check_races=True):
        not_inlined[(9,)](x, out, n)
    want = x.double()
    for _ in range(n):
        want = want * want + 1
    want += 3 * x.double() + 1
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lift.read(out).value, want, rtol=1e-14, atol=1e-14)


@pytest.mark.usefixtures("replay")
def test_the_slow_path_of_double_trigonometry() -> None:
    x = torch.tensor(
        [1e10, 1.0, -5e8, 1e300, 0.0, 2.0**31 * 3, -1e22, 710.0] * 16, dtype=torch.float64
    )
    out = torch.zeros_like(x)
    sine[(1,)](x, out, BLOCK=128)
    torch.testing.assert_close(out, torch.sin(x), rtol=1e-15, atol=1e-15)
    assert twinstep.replay.active()
