"""Every kind of kernel parameter arrives with the bytes that `struct` and torch state for it."""

from __future__ import annotations

import random
import struct
from types import FunctionType
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

import twinstep.replay
from twinstep.replay import ReplayError, UnsupportedArgument, run_ptx
from twinstep.replay.cuda import nvrtc

PTX_KINDS = {
    **{f"u{8 * size}": code for size, code in ((1, "B"), (2, "H"), (4, "I"), (8, "Q"))},
    **{f"s{8 * size}": code for size, code in ((1, "b"), (2, "h"), (4, "i"), (8, "q"))},
    **{f"b{8 * size}": code for size, code in ((1, "B"), (2, "H"), (4, "I"), (8, "Q"))},
    "f32": "f",
    "f64": "d",
}
"""PTX types of parameters and the letters that `struct` has for them."""


def bytes_of(declared: str, value: int | float | bytes, size: int) -> bytes:
    """Run a kernel that copies its first parameter, byte by byte, between two others."""
    loads = "\n".join(
        f"ld.param.u8 %r0, [x+{i}]; st.global.u8 [%rd0+{i}], %r0;" for i in range(size)
    )
    text = f"""
    .version 8.7
    .target sm_90
    .address_size 64
    .visible .entry k(.param .u8 before, {declared}, .param .u8 after, .param .u64 out)
    {{
    .reg .b32 %r<2>; .reg .b64 %rd<2>;
    ld.param.u64 %rd0, [out];
    {loads}
    ld.param.u8 %r0, [before]; st.global.u8 [%rd0+{size}], %r0;
    ld.param.u8 %r0, [after]; st.global.u8 [%rd0+{size + 1}], %r0;
    ret;
    }}
    """
    out = torch.zeros(size + 2, dtype=torch.uint8)
    run_ptx(text, "k", (1,), (1,), [0xA5, value, 0x5A, out])
    assert out[size:].tolist() == [0xA5, 0x5A]
    return bytes(out[:size].tolist())


@pytest.mark.parametrize("kind", PTX_KINDS)
def test_numbers_arrive_in_the_type_of_the_parameter(kind: str) -> None:
    code = PTX_KINDS[kind]
    size = struct.calcsize(code)
    if kind[0] == "f":
        numbers: list[int | float] = [0.0, -0.0, 1.5, -(2.0**-20), float("inf")]
    else:
        low = -(2 ** (8 * size - 1)) if kind[0] == "s" else 0
        numbers = [0, 1, 42, low, low + 2 ** (8 * size) - 1]
    for number in numbers:
        assert bytes_of(f".param .{kind} x", number, size) == struct.pack(f"<{code}", number)


@pytest.mark.parametrize("seed", range(4))
def test_parameters_of_mixed_sizes_do_not_touch_each_other(seed: int) -> None:
    """Every byte of twelve parameters is another one, and each arrives in its place."""
    rng, declared, copies, values = random.Random(seed), [], [], []
    whole = bytes(rng.sample(range(256), 256))
    for index in range(12):
        kind = rng.choice([*PTX_KINDS, "structure"])
        size = rng.choice([3, 6, 16]) if kind == "structure" else struct.calcsize(PTX_KINDS[kind])
        form = f".align {rng.choice([1, 2, 4, 8])} .b8 p{index}[{size}]"
        declared.append(f".param {form if kind == 'structure' else f'.{kind} p{index}'}")
        start = sum(map(len, values))
        values.append(whole[start : start + size])
        copies += [
            f"ld.param.u8 %r0, [p{index}+{i}]; st.global.u8 [%rd0+{start + i}], %r0;"
            for i in range(size)
        ]
    code = "\n".join(copies)
    text = f"""
    .version 8.7
    .target sm_90
    .address_size 64
    .visible .entry k({", ".join(declared)}, .param .u64 out)
    {{
    .reg .b32 %r<2>; .reg .b64 %rd<2>;
    ld.param.u64 %rd0, [out];
    {code}
    ret;
    }}
    """
    out = torch.zeros(sum(map(len, values)), dtype=torch.uint8)
    run_ptx(text, "k", (1,), (1,), [*values, out])
    assert bytes(out.tolist()) == b"".join(values)


@pytest.mark.parametrize("align", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("size", [1, 2, 6, 24])
def test_a_structure_arrives_byte_by_byte(align: int, size: int) -> None:
    value = bytes(range(7, 7 + size))
    assert bytes_of(f".param .align {align} .b8 x[{size}]", value, size) == value
    assert bytes_of(f".param .b16 x[{size}]", 2 * value, 2 * size) == 2 * value


@pytest.mark.parametrize("order", ["align 2", "ptr", "ptr .global", "ptr .global .align 16"])
def test_a_pointer_is_a_pointer_whatever_it_points_to(order: str) -> None:
    declared = ".param .align 2 .b8 x[2]" if order == "align 2" else f".param .u64 .{order} x"
    size = 2 if order == "align 2" else 8
    value = (0x1234).to_bytes(size, "little")
    assert bytes_of(declared, value, size) == value


@pytest.mark.parametrize(
    ("declared", "value", "message"),
    [
        (".param .align 2 .b8 x[2]", 42, "structure of 2 bytes, got 42: pass bytes"),
        (".param .align 2 .b8 x[2]", 42.0, "structure of 2 bytes, got 42.0: pass bytes"),
        (".param .align 4 .b8 x[8]", b"1234", "has 8 bytes, got 4"),
        (".param .f32 x", 2, "of type .f32, got the integer 2: pass 2.0"),
        (".param .u32 x", 2.0, "of type .u32, got 2.0: pass an int"),
        (".param .u16 x", 70000, "2 bytes, into which 70000 does not fit"),
        (".param .s8 x", -129, "1 bytes, into which -129 does not fit"),
    ],
)
def test_what_is_not_of_the_kind_is_refused(
    declared: str, value: int | float | bytes, message: str
) -> None:
    with pytest.raises(ReplayError, match=f"Parameter x of kernel k .*{message}"):
        bytes_of(declared, value, 1)


@triton.jit
def keep(out, value):
    tl.store(out, value.to(out.dtype.element_ty))


def keep_as(kind: Any) -> Any:
    """The kernel `keep` with a type as the annotation of `value`."""
    function = FunctionType(keep.fn.__code__, globals(), "keep")
    function.__annotations__ = {"value": kind}
    return triton.jit(function)


@triton.jit
def keep_all(out, a, nothing, pair, WIDE: tl.constexpr, nested, b):
    tl.store(out + 0, a)
    tl.store(out + 1, pair[0])
    tl.store(out + 2, pair[1])
    tl.store(out + 3, WIDE)
    tl.store(out + 4, nested[0])
    tl.store(out + 5, tl.load(nested[1][0]))
    tl.store(out + 6, nested[1][1])
    tl.store(out + 7, b)
    if nothing is not None:
        tl.store(out, 0.0)


ANNOTATED: dict[str, tuple[Any, torch.dtype, list[int | float]]] = {
    "i1": (tl.int1, torch.int8, [0, 1]),
    "i8": (tl.int8, torch.int8, [-128, 5, 127]),
    "i16": (tl.int16, torch.int16, [-(2**15), 300, 2**15 - 1]),
    "i32": (tl.int32, torch.int32, [-(2**31), 70000, 2**31 - 1]),
    "i64": (tl.int64, torch.int64, [-(2**63), 2**40, 2**63 - 1]),
    "u8": (tl.uint8, torch.uint8, [0, 200, 255]),
    "u16": (tl.uint16, torch.uint16, [0, 40000, 65535]),
    "u32": (tl.uint32, torch.uint32, [0, 2**31 + 5, 2**32 - 1]),
    "u64": (tl.uint64, torch.uint64, [0, 2**63 + 5, 2**64 - 1]),
    "fp16": (tl.float16, torch.float16, [42.0, 1.0009765625, -6e-8, 65504.0]),
    "bf16": (tl.bfloat16, torch.bfloat16, [42.0, -1.5, 2.0**-133, 3.0e38]),
    "fp32": (tl.float32, torch.float32, [0.1, -1e-45, 3e38]),
    "fp64": (tl.float64, torch.float64, [0.1, 5e-324, -1e308]),
}


@pytest.mark.usefixtures("replay")
@pytest.mark.parametrize("name", ANNOTATED)
def test_annotated_scalars_of_triton_arrive(name: str) -> None:
    kind, dtype, numbers = ANNOTATED[name]
    for number in numbers:
        out = torch.zeros(1, dtype=dtype)
        keep_as(kind)[(1,)](out, number)
        want = torch.tensor([number], dtype=dtype)
        if name == "bf16":  # Triton's launcher cuts, it does not round.
            bits = torch.tensor([number], dtype=torch.float32).view(torch.int32) >> 16
            want = bits.to(torch.int16).view(torch.bfloat16)
        assert torch.equal(out.view(torch.uint8), want.view(torch.uint8)), (number, out)


@pytest.mark.usefixtures("replay")
@pytest.mark.parametrize(
    ("kind", "number"), [(tl.uint8, -1), (tl.int64, 2**63), (tl.float16, 70000.0)]
)
def test_what_triton_itself_does_not_take_is_an_error(kind: Any, number: int | float) -> None:
    with pytest.raises(ReplayError, match="Argument value is"):
        keep_as(kind)[(1,)](torch.zeros(1), number)


class Pair(NamedTuple):
    """A tuple whose items have names."""

    first: Any
    second: Any


@pytest.mark.usefixtures("replay")
@pytest.mark.parametrize("a", [True, 1, 7, -(2**31), 2**31, 2**40, 0.15625])
def test_tuples_constants_and_nothing_take_their_places(a: bool | int | float) -> None:
    """Triton chooses the types itself here: u1, a constant, i32, i64, fp32."""
    out, five = torch.zeros(8, dtype=torch.float64), torch.tensor([5.0])
    pair, nested = Pair(16, 2.5), (1, (five, -3))
    keep_all[(1,)](out, a, None, pair, 3, nested, 0.25)
    assert out.tolist() == [float(a), 16, 2.5, 3, 1, 5, -3, 0.25]


@pytest.mark.usefixtures("replay")
def test_what_replay_cannot_pass_is_a_limit_and_no_fault() -> None:
    class Address:
        dtype = torch.float32

        def data_ptr(self) -> int:
            return 16

    with pytest.raises(UnsupportedArgument, match="a limit of replay") as caught:
        keep_as(tl.float32)[(1,)](Address(), 1.0)
    assert caught.value.construct == "Address"


@pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing() or "installed")
def test_structures_and_arrays_of_cuda_arrive() -> None:
    source = """
    #include <cuda_fp16.h>
    struct Mixed { char c; double d; short s[3]; float f[2]; };
    extern "C" __global__ void k(signed char a, Mixed m, __half h, bool b, double *out) {
        out[0] = a; out[1] = m.c; out[2] = m.d; out[3] = m.s[threadIdx.y + 2]; out[4] = m.f[1];
        out[5] = (double)__half2float(h); out[6] = b;
    }"""
    out = torch.zeros(7, dtype=torch.float64)
    mixed = struct.pack("<b7xd3h2x2f", -3, 0.1, 1, 2, -300, 4.5, 0.25)
    kernel = twinstep.replay.cuda_kernel(source, "k")
    kernel((1,), (1,), -5, mixed, struct.pack("<e", 1.5), True, out)
    assert out.tolist() == [-5, -3, 0.1, -300, 0.25, 1.5, 1]
