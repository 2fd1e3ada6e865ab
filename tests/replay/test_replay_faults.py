"""Kernels with faults: each is stopped and named with its source line, and nothing is corrupted."""

from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl

import twinstep.replay
from twinstep.replay import Misaligned, OutOfBounds, Race, UninitialisedRead

pytestmark = pytest.mark.usefixtures("replay")
HERE = __file__


def line_of(text: str) -> str:
    """This file and the number of the line that holds a text."""
    with open(HERE) as source:
        numbers = [i for i, line in enumerate(source, 1) if text in line and "line_of" not in line]
    assert len(numbers) == 1
    return f"{HERE}:{numbers[0]}"


@triton.jit
def double_off_by_one(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(x_ptr + at, 2 * x, mask=at <= n)  # off by one


@triton.jit
def neighbour(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, at, mask=at < n)
    other = tl.load(x_ptr + (at + BLOCK) % n, mask=at < n)  # another block's element
    tl.store(out_ptr + at, other, mask=at < n)


@triton.jit
def touch(x_ptr, out_ptr, at):
    tl.store(out_ptr, tl.load(x_ptr + at))  # one element


@triton.jit
def scale_narrow(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # 32 bits
    x = tl.load(x_ptr + at, mask=at < n)  # overflows
    tl.store(x_ptr + at, x + 1, mask=at < n)


@triton.jit
def scale_wide(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(x_ptr + at, x + 1, mask=at < n)


@triton.jit
def fill_aligned(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 1.0, mask=at < n)  # not what was promised


@pytest.fixture(autouse=True)
def nothing_is_corrupted(replay: None) -> Iterator[None]:
    """After every fault: memory of others untouched, and the next launch right."""
    others = [torch.full((4096,), 0x5A, dtype=torch.uint8) for _ in range(8)]
    yield
    assert all((other == 0x5A).all() for other in others)
    x = torch.arange(1000.0)
    scale_wide[(4,)](x, 1000, BLOCK=256)
    assert torch.equal(x, torch.arange(1000.0) + 1)


def test_an_off_by_one_mask_is_stopped_before_it_writes() -> None:
    storage = torch.ones(4096)
    with pytest.raises(OutOfBounds) as caught:
        double_off_by_one[(4,)](storage[:1000], 1000, BLOCK=256)
    message = str(caught.value)
    assert line_of("# off by one") in message
    assert "byte offset 4000 of x_ptr (4000 bytes)" in message
    assert "block (3, 0, 0)" in message
    assert torch.equal(storage[1000:], torch.ones(3096))


def test_an_allowed_neighbour_may_be_written() -> None:
    storage = torch.ones(4096)
    with twinstep.replay.allow(storage):
        double_off_by_one[(4,)](storage[:1000], 1000, BLOCK=256)
    assert storage[999] == 2


def test_an_allowed_tensor_is_where_it_lies_now() -> None:
    storage, elsewhere = torch.ones(4096), torch.ones(4096)
    near = storage[:]
    with twinstep.replay.allow(near):
        double_off_by_one[(4,)](storage[:1000], 1000, BLOCK=256)
        near.data = elsewhere
        with pytest.raises(OutOfBounds):
            double_off_by_one[(4,)](storage[:1000], 1000, BLOCK=256)
        near.data = storage[::2]
        double_off_by_one[(4,)](storage[:1000], 1000, BLOCK=256)
        near.data = storage[:1000]
        with pytest.raises(OutOfBounds):
            double_off_by_one[(4,)](storage[:1000], 1000, BLOCK=256)


def test_an_address_outside_everything_is_named() -> None:
    x, out = torch.ones(10), torch.zeros(1)
    with pytest.raises(OutOfBounds, match=r"of x_ptr \(40 bytes\), is outside") as caught:
        touch[(1,)](x, out, 1 << 40)
    assert line_of("# one element") in str(caught.value)


def test_a_race_between_blocks_is_found_on_request() -> None:
    x = torch.full((512,), -1, dtype=torch.int32)
    with twinstep.replay.options(check_races=True), pytest.raises(Race) as caught:
        neighbour[(4,)](x, torch.zeros_like(x), 512, BLOCK=128)
    assert line_of("# another block's element") in str(caught.value)


def test_a_kernel_without_a_race_passes_the_check() -> None:
    x = torch.ones(1000)
    with twinstep.replay.options(check_races=True):
        scale_wide[(4,)](x, 1000, BLOCK=256)
    assert torch.equal(x, torch.full((1000,), 2.0))


def test_a_read_of_unwritten_memory_is_found_on_request() -> None:
    x, out = torch.ones(10), torch.zeros(1)
    with twinstep.replay.options(uninitialised=[x]), pytest.raises(UninitialisedRead) as caught:
        touch[(1,)](x, out, 3)
    assert line_of("# one element") in str(caught.value)
    assert "4 bytes of x_ptr at byte offset 12 that nothing has written" in str(caught.value)


def test_memory_that_an_earlier_launch_wrote_may_be_read() -> None:
    x, out = torch.ones(10), torch.zeros(1)
    with twinstep.replay.options(uninitialised=[out]):
        touch[(1,)](x, out, 3)
        touch[(1,)](out, x, 0)
    assert x[0] == 1


def test_an_offset_that_overflows_32_bits_is_caught_without_the_memory() -> None:
    count = 3_000_000_000
    x = twinstep.replay.virtual_tensor(count, torch.float32)
    blocks = triton.cdiv(count, 1024)
    late = [2**21 - 1, 2**21, blocks - 1]
    with twinstep.replay.options(only_blocks=late), pytest.raises(OutOfBounds) as caught:
        scale_narrow[(blocks,)](x, count, BLOCK=1024)
    assert line_of("# overflows") in str(caught.value)
    with twinstep.replay.options(only_blocks=late):
        scale_wide[(blocks,)](x, count, BLOCK=1024)
    assert x[count - 1] == 1
    assert x[2**31] == 1
    assert x[count // 2] == 0


def test_a_misaligned_vector_store_is_stopped() -> None:
    x = torch.zeros(2048)
    with pytest.raises(Misaligned, match="not a multiple of 16") as caught:
        launch_as_if_aligned(x)
    assert line_of("# not what was promised") in str(caught.value)
    assert torch.equal(x, torch.zeros(2048))


def launch_as_if_aligned(x: torch.Tensor) -> None:
    """Launch on a pointer that is not as aligned as the compiler was told."""
    kernel = fill_aligned.warmup(x, 512, BLOCK=512, grid=(1,))
    kernel[(1, 1, 1)](x[3:], 512, 512)
