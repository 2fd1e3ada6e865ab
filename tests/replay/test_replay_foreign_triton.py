"""Kernels as others write them: well-known tutorials in our words, unchanged, against torch."""

import pytest
import torch
import triton
import triton.language as tl

import twinstep.replay

pytestmark = pytest.mark.usefixtures("replay")


@triton.jit
def vector_add(a_ptr, b_ptr, c_ptr, count, BLOCK_SIZE: tl.constexpr):
    pid = tl.program_id(axis=0)
    offsets = pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < count
    tl.store(
        c_ptr + offsets,
        tl.load(a_ptr + offsets, mask=mask) + tl.load(b_ptr + offsets, mask=mask),
        mask=mask,
    )


@triton.jit
def persistent_softmax(
    out_ptr, in_ptr, in_stride, out_stride, rows, columns, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        at = tl.arange(0, BLOCK)
        mask = at < columns
        x = tl.load(in_ptr + row * in_stride + at, mask=mask, other=-float("inf"))
        numerator = tl.exp(x - tl.max(x, axis=0))
        tl.store(out_ptr + row * out_stride + at, numerator / tl.sum(numerator, axis=0), mask=mask)


@triton.jit
def layer_norm_forward(
    x_ptr, y_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, stride, columns, eps, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    x_ptr += row * stride
    y_ptr += row * stride
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for off in range(0, columns, BLOCK):
        at = off + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + at, mask=at < columns, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / columns
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for off in range(0, columns, BLOCK):
        at = off + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < columns, other=0.0).to(tl.float32)
        x = tl.where(at < columns, x - mean, 0.0)
        squares += x * x
    rstd = 1 / tl.sqrt(tl.sum(squares, axis=0) / columns + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for off in range(0, columns, BLOCK):
        at = off + tl.arange(0, BLOCK)
        mask = at < columns
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        y = (x - mean) * rstd * tl.load(w_ptr + at, mask=mask) + tl.load(b_ptr + at, mask=mask)
        tl.store(y_ptr + at, y, mask=mask)


@triton.jit
def row_reductions(x_ptr, sum_ptr, max_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + at, mask=at < columns, other=0.0)
    tl.store(sum_ptr + row, tl.sum(x.to(tl.float32), axis=0).to(x.dtype))
    tl.store(max_ptr + row, tl.max(tl.where(at < columns, x, -float("inf")), axis=0))


@triton.jit
def seeded_dropout(x_ptr, out_ptr, n, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    keep = tl.rand(seed, at) > p
    tl.store(out_ptr + at, tl.where(keep, x / (1 - p), 0.0), mask=at < n)


@triton.jit
def matrix_product(a_ptr, b_ptr, c_ptr, K, M: tl.constexpr, N: tl.constexpr, DEPTH: tl.constexpr):
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, DEPTH)
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, K, DEPTH):
        a = tl.load(a_ptr + i[:, None] * K + (start + k)[None, :])
        b = tl.load(b_ptr + (start + k)[:, None] * N + j[None, :])
        total += tl.dot(a, b)  # the product
    tl.store(c_ptr + i[:, None] * N + j[None, :], total)


def test_vector_addition() -> None:
    a, b = torch.rand(98432), torch.rand(98432)
    c = torch.empty_like(a)
    vector_add[lambda meta: (triton.cdiv(98432, meta["BLOCK_SIZE"]),)](
        a, b, c, 98432, BLOCK_SIZE=1024
    )
    assert torch.equal(c, a + b)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_softmax_over_a_loop_of_rows_that_is_pipelined(stages: int) -> None:
    x = torch.randn(37, 781)
    y = torch.empty_like(x)
    persistent_softmax[(8,)](y, x, 781, 781, 37, 781, BLOCK=1024, STAGES=stages, num_warps=8)
    torch.testing.assert_close(y, torch.softmax(x, dim=1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_layer_norm_forward(dtype: torch.dtype) -> None:
    x, w, b = torch.randn(9, 1152).to(dtype), torch.rand(1152).to(dtype), torch.rand(1152).to(dtype)
    y, mean, rstd = torch.empty_like(x), torch.empty(9), torch.empty(9)
    layer_norm_forward[(9,)](x, y, w, b, mean, rstd, 1152, 1152, 1e-5, BLOCK=512, num_warps=4)
    want = torch.nn.functional.layer_norm(x.double(), (1152,), w.double(), b.double())
    torch.testing.assert_close(y, want.to(dtype))
    torch.testing.assert_close(mean, x.double().mean(1).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [33, 1000])
def test_reductions_over_rows_of_16_bits(dtype: torch.dtype, columns: int) -> None:
    """Multiples of 1/8 add without rounding in fp32, so that one rounding to 16 bits is left."""
    x = (torch.randint(-16, 17, (6, columns)) / 8).to(dtype)
    total, largest = torch.empty(6, dtype=dtype), torch.empty(6, dtype=dtype)
    row_reductions[(6,)](x, total, largest, columns, BLOCK=1024)
    assert torch.equal(total, x.double().sum(1).to(dtype))
    assert torch.equal(largest, x.max(1).values)


def test_seeded_dropout_keeps_its_share_and_repeats() -> None:
    x = torch.ones(20_000)
    first, again, other = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    for out, seed in ((first, 7), (again, 7), (other, 8)):
        seeded_dropout[(20,)](x, out, 20_000, 0.25, seed, BLOCK=1024)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert set(first.tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    # Five standard deviations of a binomial share.
    assert abs((first > 0).double().mean() - 0.75) < 5 * (0.75 * 0.25 / 20_000) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_dot_product_is_refused_naming_the_instruction(dtype: torch.dtype) -> None:
    a, b, c = torch.ones(64, 64, dtype=dtype), torch.ones(64, 64, dtype=dtype), torch.zeros(64, 64)
    with pytest.raises(twinstep.replay.UnknownInstruction) as caught:
        matrix_product[(1,)](a, b, c, 64, M=64, N=64, DEPTH=32)
    message = str(caught.value)
    assert message.startswith(("Instruction wgmma.", "Instruction mma."))
    assert "kernel matrix_product, " in message
    assert f"{__file__}:" in message
    assert "\n" not in message
    assert torch.equal(c, torch.zeros(64, 64))
