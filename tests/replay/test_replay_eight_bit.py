"""8-bit floats: every conversion of every pattern gives what torch gives, saturated at the ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from twinstep.replay import run_ptx

KINDS = {"e4m3x2": (torch.float8_e4m3fn, 448.0), "e5m2x2": (torch.float8_e5m2, 57344.0)}


def converted(opcode: str, *sources: torch.Tensor, out: torch.dtype) -> torch.Tensor:
    """One conversion for each element: of pairs of words of 16 bits, or of two fp32 values."""
    size, wide = sources[0].element_size(), torch.tensor([], dtype=out).element_size()
    moves = "".join(
        f"ld.param.u64 %rd1, [p{i}]; mad.wide.u32 %rd1, %r1, {size}, %rd1; "
        f"ld.global.b{8 * size} %s{i}, [%rd1];\n"
        for i in range(len(sources))
    )
    names = ", ".join(f"%s{i}" for i in range(len(sources)))
    params = "".join(f".param .u64 p{i}, " for i in range(len(sources)))
    text = f"""
    .version 8.7
    .target sm_90
    .address_size 64
    .visible .entry k({params}.param .u64 out)
    {{
    .reg .b32 %r<3>; .reg .b64 %rd<2>; .reg .b{8 * size} %s<2>; .reg .b{8 * wide} %d;
    mov.u32 %r0, %ctaid.x; mov.u32 %r2, %tid.x; mad.lo.u32 %r1, %r0, 256, %r2;
    {moves}
    {opcode} %d, {names};
    ld.param.u64 %rd1, [out]; mad.wide.u32 %rd1, %r1, {wide}, %rd1;
    st.global.b{8 * wide} [%rd1], %d;
    ret;
    }}
    """
    result = torch.zeros(len(sources[0]), dtype=out)
    run_ptx(text, "k", (len(result) // 256,), (256,), [*sources, result])
    return result


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits, but for NaN, which is canonical."""
    bits = {1: torch.uint8, 2: torch.int16}[want.element_size()]
    nan = torch.isnan(want.float())
    assert torch.equal(got.view(bits)[~nan], want.view(bits)[~nan])
    assert set(got.view(bits)[nan].tolist()) <= {0x7F, 0x7FFF}
    assert torch.isnan(got.float())[nan].all()


def narrowed(x: torch.Tensor, kind: str, relu: bool) -> torch.Tensor:
    """The statement of torch, which does not saturate."""
    dtype, largest = KINDS[kind]
    x = torch.where(torch.signbit(x) & ~x.isnan(), 0.0, x) if relu else x
    return x.clamp(-largest, largest).to(dtype)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_half_becomes_eight_bits_as_in_torch(kind: str, relu: bool) -> None:
    low = torch.arange(2**16).to(torch.int16).view(torch.float16)
    high = low.flip(0)
    pairs = torch.stack([low, high], 1).view(torch.int32).reshape(-1)
    opcode = f"cvt.rn.satfinite{'.relu' * relu}.{kind}.f16x2"
    found = converted(opcode, pairs, out=torch.int16).view(KINDS[kind][0]).reshape(-1, 2)
    for index, half in enumerate((low, high)):
        assert_same(found[:, index].contiguous(), narrowed(half.float(), kind, relu))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_eight_bits_become_a_half_as_in_torch(kind: str, relu: bool) -> None:
    pairs = torch.arange(2**16).to(torch.int16)
    found = converted(f"cvt.rn{'.relu' * relu}.f16x2.{kind}", pairs, out=torch.int32)
    want = pairs.view(KINDS[kind][0]).to(torch.float16)
    want = torch.where(torch.signbit(want) & ~want.isnan(), 0.0, want) if relu else want
    assert_same(found.view(torch.float16), want)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_singles_at_every_tie_and_beside_it_become_eight_bits_as_in_torch(
    kind: str, relu: bool
) -> None:
    dtype, _ = KINDS[kind]
    finite = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    finite = finite[finite.isfinite()]
    points = torch.cat([finite, (finite[1:] + finite[:-1]) / 2, finite.max() * torch.rand(600)])
    corners = [2.0**-149, 2.0**-126, 3.4e38, float("inf"), float("nan"), 464.0, 61440.0, 2.0**-20]
    near = torch.cat([points, torch.tensor(corners)]).numpy()
    every = np.concatenate([near, np.nextafter(near, 0), np.nextafter(near, np.float32(np.inf))])
    x = torch.from_numpy(np.resize(np.concatenate([every, -every]), 6144))
    opcode = f"cvt.rn.satfinite{'.relu' * relu}.{kind}.f32"
    found = converted(opcode, x, x.flip(0).contiguous(), out=torch.int16).view(dtype)
    want = narrowed(x, kind, relu)
    assert_same(found[1::2].contiguous(), want)
    assert_same(found[::2].contiguous(), want.view(torch.uint8).flip(0).view(dtype))


@triton.jit
def cast(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(out_ptr.dtype.element_ty))


@pytest.mark.usefixtures("replay")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wide", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_kernels_store_and_load_eight_bits(kind: str, wide: torch.dtype) -> None:
    dtype, largest = KINDS[kind]
    x = (torch.randn(1024, generator=torch.Generator().manual_seed(3)) * largest / 3).to(wide)
    eight, back = torch.zeros(1024, dtype=dtype), torch.zeros(1024, dtype=wide)
    cast[(4,)](x, eight, BLOCK=256)
    assert torch.equal(eight.float(), x.float().clamp(-largest, largest).to(dtype).float())
    cast[(4,)](eight, back, BLOCK=256)
    assert torch.equal(back, eight.to(wide))
