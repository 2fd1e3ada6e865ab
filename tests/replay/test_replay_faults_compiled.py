"""Faults in compiled kernels: barriers taken away or skipped, orders that matter, launches."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import twinstep.replay
from twinstep.replay import Deadlock, Race, UninitialisedRead, run_ptx
from twinstep.replay.corpus.compile_cuda import SOURCES
from twinstep.replay.corpus.store import read
from twinstep.replay.triton import driver

HERE = Path(__file__)


@triton.jit
def add_one(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n) + 1, mask=at < n)


@triton.jit
def pass_on(x_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)  # what the block before has left
    tl.store(x_ptr + BLOCK + at, x + 1)


@triton.jit
def clear(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), 0.0)


@triton.jit
def past_the_end(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 7.0)  # no mask


@triton.jit
def count(counter_ptr, out_ptr, STRONG: tl.constexpr, STORES: tl.constexpr):
    t = tl.load(counter_ptr, volatile=STRONG)
    if STRONG:
        tl.atomic_add(counter_ptr, 1, sem="relaxed")
    else:
        tl.store(counter_ptr, t + 1)
    if STORES:
        tl.store(out_ptr + 128 * tl.program_id(0) + tl.arange(0, 128), t + tl.arange(0, 128))


@pytest.fixture(autouse=True)
def nothing_is_corrupted(replay: None) -> Iterator[None]:
    """After every fault: memory of others untouched, the next launch right, all switches back."""
    others = [torch.full((4096,), 0x5A, dtype=torch.uint8) for _ in range(8)]
    depth = driver._COUNT
    yield
    assert all((other == 0x5A).all() for other in others)
    x = torch.arange(1000.0)
    with twinstep.replay.launches() as log:
        add_one[(4,)](x, 1000, BLOCK=256)
    assert torch.equal(x, torch.arange(1000.0) + 1)
    assert log[0].bytes_read == log[0].bytes_written == 4000
    assert depth == driver._COUNT


def compiled(case: str) -> tuple[str, str]:
    """A CUDA C++ kernel of the corpus as compiled for sm_90, and its name."""
    corpus = read()
    entry = next(e for e in corpus.entries if e.case == case and e.sm == 90)
    return corpus.text(entry).whole, entry.kernel


def line_of(file: str, text: str) -> str:
    """File and line of the only line of a CUDA C++ source that holds a text."""
    lines = (SOURCES / file).read_text().splitlines()
    numbers = [number for number, line in enumerate(lines, 1) if text in line]
    assert len(numbers) == 1
    return f"{file}:{numbers[0]}"


def barriers(ptx: str, kernel: str) -> list[re.Match[str]]:
    """The barriers of one kernel of a text."""
    start = ptx.index(f".entry {kernel}(")
    end = ptx.find(".entry", start + 1)
    found = re.compile(r"(?:bar\.sync|barrier\.sync)\s+0;")
    return list(found.finditer(ptx, start, end if end > 0 else len(ptx)))


def run_scan(ptx: str, kernel: str) -> torch.Tensor:
    """Run the running sum of two blocks."""
    x = torch.arange(256, dtype=torch.int32)
    out = torch.zeros_like(x)
    run_ptx(ptx, kernel, (2,), (128,), [x, out])
    return out.reshape(2, 128)


def test_with_its_barriers_the_compiled_scan_has_no_race() -> None:
    with twinstep.replay.options(check_races=True):
        out = run_scan(*compiled("running_sum_in_shared_memory"))
    assert torch.equal(out, torch.arange(256).reshape(2, 128).cumsum(1).int())


def test_each_missing_barrier_is_a_race_with_both_lines() -> None:
    """But for the last, after which every thread reads what it wrote itself."""
    ptx, kernel = compiled("running_sum_in_shared_memory")
    found = barriers(ptx, kernel)
    assert len(found) >= 3
    for barrier in found[:-1]:
        without = ptx[: barrier.start()] + ptx[barrier.end() :]
        with twinstep.replay.options(check_races=True), pytest.raises(Race) as caught:
            run_scan(without, kernel)
        both = r"after a (read|write) at \S*scans\.cu:\d+ by .*, \S*scans\.cu:\d+, `"
        assert re.search(both, str(caught.value))


def test_a_barrier_that_some_threads_skip_is_a_deadlock_with_its_line() -> None:
    """They arrive at the next one instead, and in the end the others wait for one too many."""
    ptx, kernel = compiled("running_sum_in_shared_memory")
    first = barriers(ptx, kernel)[0]
    skip = (
        "{ .reg .pred %skip; .reg .b32 %which; mov.u32 %which, %tid.x;"
        " setp.lt.u32 %skip, %which, 40; @%skip bra $PAST; }"
    )
    changed = f"{ptx[: first.start()]}{skip}\n{first[0]}\n$PAST:\n{ptx[first.end() :]}"
    with pytest.raises(Deadlock) as caught:
        run_scan(changed, kernel)
    message = str(caught.value)
    assert "40 threads (first (0, 0, 0)) have finished" in message
    assert re.search(r"88 threads \(first \(40, 0, 0\)\) wait at \S*scans\.cu:12 `bar", message)


def test_shared_memory_that_nobody_wrote_is_named() -> None:
    ptx, kernel = compiled("row_sums_by_shuffles")
    start = ptx.index(f".entry {kernel}(")
    store = re.compile(r"st\.shared\.\w+ [^;]*;").search(ptx, start)
    assert store is not None
    without = ptx[: store.start()] + ptx[store.end() :]
    x, out = torch.ones(3, 300), torch.zeros(3)
    with twinstep.replay.options(uninitialised=[out]), pytest.raises(UninitialisedRead) as caught:
        run_ptx(without, kernel, (3,), (96,), [x, out, 300])
    assert line_of("sums.cu", "threadIdx.x < (blockDim.x + 31)") in str(caught.value)


def test_a_result_that_depends_on_the_order_of_blocks_is_found_by_permuting() -> None:
    """Blocks of one batch run as one, so it takes more than a batch for an order to show."""
    x, y = torch.zeros(401 * 128), torch.zeros(401 * 128)
    pass_on[(400,)](x, BLOCK=128)
    with twinstep.replay.options(order="permuted", seed=1):
        pass_on[(400,)](y, BLOCK=128)
    assert not torch.equal(x, y)
    with twinstep.replay.options(check_races=True), pytest.raises(Race) as caught:
        pass_on[(4,)](torch.zeros(640), BLOCK=128)
    assert f"{HERE}:" in str(caught.value)


@pytest.mark.parametrize("strong", [False, True], ids=["plain", "strong"])
@pytest.mark.parametrize("stores", [False, True], ids=["counts", "counts and stores"])
@pytest.mark.parametrize("blocks", [1, 2])
def test_a_read_races_with_a_write_if_the_reader_stores_afterwards(
    strong: bool, stores: bool, blocks: int
) -> None:
    """All threads of a program read a scalar and one writes it: what the others read is unused.

    Strong accesses race between blocks alone, where the block stores what it has read.
    """
    counter, out = torch.zeros(1, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
    right = not (stores and blocks > 1) if strong else not (stores or blocks > 1)
    with twinstep.replay.options(check_races=True):
        if right:
            count[(blocks,)](counter, out, STRONG=strong, STORES=stores)
            assert counter.item() == blocks
            return
        with pytest.raises(Race, match=r"of 4 bytes of counter_ptr .* after a read at"):
            count[(blocks,)](counter, out, STRONG=strong, STORES=stores)


def test_launches_in_sequence_are_ordered() -> None:
    """Bytes that one launch wrote may be read and overwritten by the next, in any block."""
    x, want = torch.empty(640), torch.zeros(5)
    with twinstep.replay.options(check_races=True, uninitialised=[x]):
        clear[(5,)](x, BLOCK=128)
        for block in range(4):
            pass_on[(1,)](x[128 * block :], BLOCK=128)
            add_one[(5,)](x, 640, BLOCK=128)
            want[block + 1] = want[block] + 1
            want += 1
    assert torch.equal(x, want.repeat_interleave(128))


def test_a_fault_between_launches_leaves_what_came_before_and_after_right() -> None:
    storage = torch.zeros(2048)
    x = storage[:1000]
    add_one[(4,)](x, 1000, BLOCK=256)
    with pytest.raises(twinstep.replay.OutOfBounds) as caught:
        past_the_end[(4,)](x, 1000, BLOCK=256)
    assert f"{HERE}:" in str(caught.value)
    assert torch.equal(storage[1000:], torch.zeros(1048))
    before = x.clone()
    add_one[(4,)](x, 1000, BLOCK=256)
    assert torch.equal(x, before + 1)
