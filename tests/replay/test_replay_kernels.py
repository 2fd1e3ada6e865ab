"""Kernels written as a user would, run unchanged on CPU tensors and compared with torch."""

import threading

import pytest
import torch
import triton
import triton.language as tl

import twinstep.replay

pytestmark = pytest.mark.usefixtures("replay")


@triton.jit
def add_vectors(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(x_ptr + at, mask=inside)
    y = tl.load(y_ptr + at, mask=inside)
    tl.store(out_ptr + at, x + y, mask=inside)


@triton.jit
def softmax_rows(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(x_ptr + row * columns + at, mask=inside, other=-float("inf")).to(tl.float32)
    shifted = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * columns + at, shifted / tl.sum(shifted, axis=0), mask=inside)


@triton.jit
def normalise_rows(x_ptr, out_ptr, w_ptr, b_ptr, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * columns + at, mask=at < columns, other=0.0)
    mean = tl.sum(total, axis=0) / columns
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * columns + at, mask=at < columns, other=0.0)
        centred = tl.where(at < columns, x - mean, 0.0)
        squares += centred * centred
    scale = 1 / tl.sqrt(tl.sum(squares, axis=0) / columns + eps)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        x = tl.load(x_ptr + row * columns + at, mask=inside, other=0.0)
        w = tl.load(w_ptr + at, mask=inside)
        b = tl.load(b_ptr + at, mask=inside)
        tl.store(out_ptr + row * columns + at, (x - mean) * scale * w + b, mask=inside)


@triton.jit
def sum_rows(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + at, mask=at < columns, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(x, axis=0))


@triton.jit
def histogram(x_ptr, counts_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.atomic_add(counts_ptr + tl.load(x_ptr + at, mask=inside, other=0), 1, mask=inside)


@triton.jit
def running_sum(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.cumsum(tl.load(x_ptr + at), axis=0))


@triton.jit
def collatz(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0))
    count = 0
    while x != 1:
        if x % 2 == 0:  # noqa: SIM108 - a branch is the point
            x = x // 2
        else:
            x = 3 * x + 1
        count += 1
    tl.store(out_ptr + tl.program_id(0), count)


@triton.jit
def multiply_blocks(a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    i = tl.arange(0, N)[:, None]
    j = tl.arange(0, N)[None, :]
    a = tl.load(a_ptr + i * N + j)
    b = tl.load(b_ptr + i * N + j)
    tl.store(c_ptr + i * N + j, tl.dot(a, b))


@pytest.mark.parametrize("n", [1, 98, 1024, 98432])
def test_vector_addition_equals_torch(n: int) -> None:
    x, y, out = torch.randn(n), torch.randn(n), torch.empty(n)
    add_vectors[(triton.cdiv(n, 1024),)](x, y, out, n, BLOCK=1024)
    assert torch.equal(out, x + y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_softmax_agrees_with_torch_and_is_charged(dtype: torch.dtype) -> None:
    x = torch.randn(7, 781).to(dtype)
    out = torch.empty_like(x)
    with twinstep.replay.launches() as log:
        softmax_rows[(7,)](x, out, 781, BLOCK=1024)
    torch.testing.assert_close(out, torch.softmax(x.float(), dim=1).to(dtype))
    assert set(log[0].approximations) == {"ex2.approx.f32", "div.full.f32"}


def test_layer_norm_forward_agrees_with_torch() -> None:
    x, w, b = torch.randn(5, 1151), torch.rand(1151), torch.rand(1151)
    out = torch.empty_like(x)
    normalise_rows[(5,)](x, out, w, b, 1151, 1e-5, BLOCK=256)
    torch.testing.assert_close(out, torch.nn.functional.layer_norm(x, (1151,), w, b))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 33, 512, 1000])
def test_sums_of_rows_agree_with_torch(dtype: torch.dtype, columns: int) -> None:
    x = torch.randn(6, columns).to(dtype)
    out = torch.empty(6, dtype=torch.float32)
    sum_rows[(6,)](x, out, columns, BLOCK=1024)
    torch.testing.assert_close(out, x.double().sum(dim=1).float(), rtol=1e-5, atol=1e-4)


def test_a_histogram_counts_every_element() -> None:
    x = torch.randint(0, 10, (5000,), dtype=torch.int32)
    counts = torch.zeros(10, dtype=torch.int32)
    histogram[(5,)](x, counts, 5000, BLOCK=1024)
    assert torch.equal(counts, torch.bincount(x, minlength=10).int())


def test_a_scan_equals_torch() -> None:
    x = torch.randint(-100, 100, (2048,), dtype=torch.int32)
    out = torch.empty_like(x)
    running_sum[(1,)](x, out, BLOCK=2048)
    assert torch.equal(out, torch.cumsum(x, 0).int())


def test_blocks_that_loop_for_different_times_each_end() -> None:
    x = torch.arange(1, 41, dtype=torch.int32)
    out = torch.empty_like(x)
    collatz[(40,)](x, out, 40, BLOCK=1)

    def steps(n: int) -> int:
        return 0 if n == 1 else 1 + steps(n // 2 if n % 2 == 0 else 3 * n + 1)

    assert out.tolist() == [steps(n) for n in range(1, 41)]


def test_a_dot_product_is_refused_with_the_instruction_named() -> None:
    a = torch.randn(32, 32)
    with pytest.raises(twinstep.replay.UnknownInstruction, match=r"(mma|ldmatrix).*multiply"):
        multiply_blocks[(1,)](a, a, torch.empty_like(a), N=32)


def test_launches_from_several_threads_do_not_disturb_each_other() -> None:
    inputs = [torch.randn(5000) for _ in range(6)]
    outputs = [torch.empty(5000) for _ in range(6)]

    def work(index: int) -> None:
        for _ in range(3):
            add_vectors[(5,)](inputs[index], inputs[index], outputs[index], 5000, BLOCK=1024)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(o, 2 * i) for i, o in zip(inputs, outputs, strict=True))


def test_bytes_are_counted_by_buffer() -> None:
    n = 10_000
    x, y, out = torch.randn(n), torch.randn(n), torch.empty(n)
    with twinstep.replay.launches() as log:
        add_vectors[(triton.cdiv(n, 1024),)](x, y, out, n, BLOCK=1024)
    (launch,) = log
    assert launch.kernel == "add_vectors"
    assert launch.grid == (10, 1, 1)
    assert launch.buffers["x_ptr"].read == launch.buffers["y_ptr"].read == 4 * n
    assert launch.buffers["out_ptr"].written == 4 * n
    assert launch.bytes_read == 8 * n
    assert launch.bytes_written == 4 * n
    assert launch.opcodes["add.f32"] + launch.opcodes["add.rn.f32"] == 10 * 1024


def test_permuted_blocks_give_the_same_sum() -> None:
    n = 200_000
    x, y, out = torch.randn(n), torch.randn(n), torch.empty(n)
    with twinstep.replay.options(order="permuted", seed=7):
        add_vectors[(triton.cdiv(n, 1024),)](x, y, out, n, BLOCK=1024)
    assert torch.equal(out, x + y)
