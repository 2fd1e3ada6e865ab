"""Tensors larger than memory: what they hold, what lies around them, what they cost."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import twinstep.replay
from twinstep.replay import (
    OutOfBounds,
    ReplayError,
    ends_of,
    folded_tensor,
    virtual_ends,
    virtual_tensor,
)

HUGE = 3_000_000_000


@triton.jit
def add_one(x_ptr, n, BLOCK: tl.constexpr, NARROW: tl.constexpr):
    block = tl.program_id(0)
    if not NARROW:
        block = block.to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n) + 1, mask=at < n)  # the access


@pytest.fixture(autouse=True)
def _on_replay() -> Iterator[None]:
    twinstep.replay.activate()
    yield
    twinstep.replay.deactivate()


def test_virtual_ends_hold_the_small_tensor_twice() -> None:
    first, last = torch.arange(3.0), torch.arange(5.0).to(torch.bfloat16)
    kept, large = virtual_ends([first, last], HUGE)
    assert torch.equal(kept, first)
    assert kept.data_ptr() != first.data_ptr()
    assert large.numel() == HUGE
    assert all(torch.equal(end, last) for end in ends_of(large, 5))
    assert large[HUGE // 2] == 0


def test_virtual_ends_leave_counters_and_empty_lists_alone() -> None:
    assert virtual_ends([], HUGE) == []
    assert virtual_ends([torch.tensor(3)], HUGE)[0].item() == 3
    assert virtual_ends([torch.zeros(0)], HUGE)[0].numel() == 0


def test_virtual_ends_that_would_overlap_are_refused() -> None:
    with pytest.raises(ValueError, match="numel is 9, but should be at least 10"):
        virtual_ends([torch.zeros(5)], 9)


def test_only_ends_runs_the_first_and_the_last_blocks() -> None:
    x = torch.zeros(1000)
    with twinstep.replay.options(only_ends=2):
        add_one[(10,)](x, 1000, BLOCK=128, NARROW=False)
    assert x[:256].eq(1).all()
    assert x[256:].eq(0).all()  # the grid is two blocks too long: the last two own nothing
    with twinstep.replay.options(only_ends=5):
        add_one[(4,)](x, 1000, BLOCK=256, NARROW=False)
    assert x[256:].eq(1).all()


@triton.jit
def counted(count_ptr, x_ptr, TICKET: tl.constexpr):
    drawn = tl.atomic_add(count_ptr, 1, sem="relaxed")
    if TICKET and drawn == tl.num_programs(0) - 1:
        tl.store(x_ptr, 1)


@pytest.mark.parametrize("ticket", [True, False])
def test_an_atomic_that_decides_is_named_where_blocks_were_left_out(ticket: bool) -> None:
    count, x = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with twinstep.replay.launches() as log:
        counted[(9,)](count, x, TICKET=ticket)
        with twinstep.replay.options(only_ends=2):
            counted[(9,)](count, x, TICKET=ticket)
    whole, part = log
    assert not whole.miscounted_at
    assert (Path(__file__).name in part.miscounted_at) is ticket


@triton.jit
def mark(x_ptr):
    width, height = tl.num_programs(0), tl.num_programs(1)
    at = (tl.program_id(2) * height + tl.program_id(1)) * width + tl.program_id(0)
    tl.store(x_ptr + at, 1)


def test_only_ends_are_those_of_every_axis() -> None:
    x = torch.zeros(2, 20, 70_000, dtype=torch.int32)
    with twinstep.replay.options(only_ends=3):
        mark[(70_000, 20, 2)](x)
    near = [torch.tensor([min(i, n - 1 - i) < 3 for i in range(n)]) for n in x.shape]
    want = near[0][:, None, None] & near[1][:, None] & near[2]
    want[:, :, -1] = True
    assert torch.equal(x.bool(), want)


def test_the_middle_of_every_axis_runs_too_where_that_is_asked_for() -> None:
    x = torch.zeros(1, 20, 70_000, dtype=torch.int32)
    with twinstep.replay.options(only_ends=3, and_middle=True):
        mark[(70_000, 20, 1)](x)
    near = [
        torch.tensor([min(i, n - 1 - i) < 3 or -3 <= i - n // 2 < 3 for i in range(n)])
        for n in x.shape[1:]
    ]
    want = near[0][:, None] & near[1]
    # A row that was folded has its middle in one of these lines, and its end in the last one.
    want[:, [34_999, 35_000, 69_999]] = True
    assert torch.equal(x[0].bool(), want)


def test_only_ends_run_all_of_the_last_line_of_a_folded_row() -> None:
    x = torch.zeros(1, 12, 500, dtype=torch.int32)
    with twinstep.replay.options(only_ends=2):
        mark[(500, 12, 1)](x)
    assert x[0, -1].all()
    assert x[0, :, -1].all()
    assert not x[0, 2:-2, 2:-2].any()


def test_a_grid_that_no_gpu_takes_is_refused() -> None:
    x = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ReplayError, match="grid of 1 x 65,536 x 1 blocks, but a GPU takes at most"):
        mark[(1, 65_536)](x)


@triton.jit
def bump(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr, tl.load(x_ptr) + 1)


@pytest.mark.parametrize("restored", [[], ["x_ptr"]])
def test_launches_of_a_tuner_are_marked_unless_it_restores(restored: list[str]) -> None:
    configs = [triton.Config({"BLOCK": block}) for block in (16, 32)]
    tuned = triton.autotune(configs, key=[], restore_value=restored)(bump)
    x = torch.zeros(1)
    with twinstep.replay.launches() as log:
        tuned[(1,)](x)
        tuned[(1,)](x)
    marks = [launch.tuning for launch in log]
    assert marks == ([False] * 4 if restored else [True, True, False, False])
    assert x.item() == (2 if restored else 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrapped_offset_never_lands_in_another_tensor(dtype: torch.dtype) -> None:
    large = [virtual_tensor(HUGE, dtype) for _ in range(3)]
    grid = (triton.cdiv(HUGE, 1024),)
    line = next(
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if text.endswith("# the access")
    )
    with twinstep.replay.allow(*large), twinstep.replay.options(only_ends=2):
        for x in large:
            with pytest.raises(OutOfBounds, match=f"test_replay_virtual.py:{line}"):
                add_one[grid](x, HUGE, BLOCK=1024, NARROW=True)
            assert x[HUGE - 1] == 0
            add_one[grid](x, HUGE, BLOCK=1024, NARROW=False)
            assert x[HUGE - 1] == 1


def test_a_folded_tensor_repeats_its_tile() -> None:
    tile = torch.arange(4096.0)
    folded = folded_tensor(tile, 10_000)
    assert folded.numel() == 10_000
    assert torch.equal(folded[4096:8192], tile)
    folded[5000] = -1
    assert folded[5000 - 4096] == -1
    assert tile[5000 - 4096] == 5000 - 4096


def test_a_tile_of_part_of_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match="tile has 40 bytes"):
        folded_tensor(torch.zeros(10), 100)


def test_a_kernel_runs_every_block_of_a_folded_tensor() -> None:
    tile = torch.zeros(4096)
    folded = folded_tensor(tile, 1 << 20)
    with twinstep.replay.launches() as log:
        add_one[(1 << 10,)](folded, 1 << 20, BLOCK=1024, NARROW=False)
    assert (log[0].bytes_read, log[0].bytes_written) == (4 << 20, 4 << 20)
