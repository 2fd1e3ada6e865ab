"""Strict provenance: an access reaches the tensor its address came from, or nothing."""

from __future__ import annotations

import struct

import pytest
import torch
import triton
import triton.language as tl

from twinstep.replay import (
    OutOfBounds,
    Race,
    UninitialisedRead,
    allow,
    launches,
    options,
    run_ptx,
    virtual_tensor,
)

pytestmark = pytest.mark.usefixtures("replay")


@triton.jit
def put(x_ptr, y_ptr, at):
    tl.store(x_ptr + at, tl.load(y_ptr))  # the store


@triton.jit
def add_by_table(table_ptr, n, past, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x = tl.load(table_ptr + row).to(tl.pointer_type(tl.float32))
    at = tl.arange(0, BLOCK)
    tl.store(x + at + past, tl.load(x + at, mask=at < n) + 1, mask=at < n)


@triton.jit
def copy_words(from_ptr, to_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(to_ptr + at, tl.load(from_ptr + at))


@triton.jit
def copy_and_follow(from_ptr, to_ptr, out_ptr):
    address = tl.load(from_ptr)
    tl.store(to_ptr, address)
    tl.store(out_ptr, tl.load(address.to(tl.pointer_type(tl.float32))))


@triton.jit
def select(x_ptr, y_ptr, second, at):
    chosen = x_ptr
    if second:
        chosen = y_ptr
    tl.store(chosen + at, 7.0)


def neighbours() -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of 100 elements without room between them."""
    storage = torch.zeros(200)
    return storage[:100], storage[100:]


def line_of(text: str) -> str:
    with open(__file__) as source:
        (number,) = [i for i, line in enumerate(source, 1) if f"# {text}" in line][:1]
    return f"{__file__}:{number}"


def test_a_store_that_lands_in_the_adjacent_argument_is_out_of_bounds() -> None:
    x, y = neighbours()
    put[(1,)](x, y, 100)  # nothing asked, nothing seen
    with options(strict_provenance=True):
        put[(1,)](x, y, 99)
        with pytest.raises(OutOfBounds, match=r"400 of x_ptr \(400 bytes\), is outside") as caught:
            put[(1,)](x, y, 100)
        with pytest.raises(OutOfBounds, match=r"byte offset -4 of x_ptr"):
            put[(1,)](y, x, -1)
    assert line_of("the store") in str(caught.value)
    assert f"{x.data_ptr() + 400:#x}" in str(caught.value)


def test_bytes_between_the_elements_of_a_view_are_out_of_bounds() -> None:
    base, one = torch.zeros(4, 8), torch.ones(1)
    view = base[:, :3]
    with options(strict_provenance=True):
        for at in (0, 2, 8, 26):
            put[(1,)](view, one, at)
        for at in (3, 7, 25 - 2):
            with pytest.raises(OutOfBounds, match="of x_ptr .*, belongs to no element of it"):
                put[(1,)](view, one, at)
        with pytest.raises(OutOfBounds, match="is outside it"):
            put[(1,)](view, one, 27)
        put[(1,)](base, one, 3)
        put[(1,)](torch.zeros(1).expand(5), one, 0)
        transposed = torch.zeros(3, 5).t()
        for at in range(15):
            put[(1,)](transposed, one, at)
    assert base.nonzero().tolist() == [[0, 0], [0, 2], [0, 3], [1, 0], [3, 2]]


def table_of(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors])


def test_a_loaded_address_belongs_to_the_tensor_that_it_points_at() -> None:
    x, y = neighbours()
    table = table_of(x, y, x[50:])
    with options(strict_provenance=True), allow(part=x[:50], first=x, second=y):
        add_by_table[(2,)](table, 100, 0, BLOCK=128)
        assert torch.equal(torch.cat([x, y]), torch.ones(200))
        with pytest.raises(OutOfBounds, match="of first"):
            add_by_table[(1,)](table, 100, 1, BLOCK=128)
        add_by_table[(1,)](table[2:], 50, 0, BLOCK=128)
        with pytest.raises(OutOfBounds, match="of first"):
            add_by_table[(1,)](table[2:], 51, 0, BLOCK=128)
        with pytest.raises(OutOfBounds, match="of second"):
            add_by_table[(1,)](table[1:], 100, -1, BLOCK=128)


@pytest.mark.parametrize("asked", [False, True])
def test_tensors_whose_addresses_are_in_an_argument_are_within_reach(asked: bool) -> None:
    x, y = torch.zeros(100), torch.zeros(2, 100)
    table = table_of(x, y[1])
    with options(strict_provenance=asked):
        add_by_table[(2,)](table, 100, 0, BLOCK=128)
        assert [float(one.sum()) for one in (x, y, y[1])] == [100, 100, 100]
        with pytest.raises(OutOfBounds):
            add_by_table[(1,)](table, 100, 4096, BLOCK=128)
        table[0] = 1 << 46
        with pytest.raises(OutOfBounds):
            add_by_table[(1,)](table, 100, 0, BLOCK=128)


@pytest.mark.parametrize("asked", [False, True])
def test_the_kernel_leaves_real_addresses_in_memory(asked: bool) -> None:
    x, out = torch.full((4,), 3.0), torch.zeros(1)
    table, copy, other = table_of(x), torch.zeros(1, dtype=torch.int64), torch.zeros(2)
    pattern = torch.randint(-(2**63), 2**63 - 1, (256,), generator=torch.Generator().manual_seed(1))
    words = torch.empty_like(pattern)
    with options(strict_provenance=asked), allow(x):
        copy_and_follow[(1,)](table, copy, out)
        copy_words[(1,)](pattern, words, BLOCK=256)
    assert (copy.item(), out.item()) == (x.data_ptr(), 3.0)
    assert torch.equal(pattern, words)
    assert not other.any()


def test_a_tensor_goes_by_all_its_names_and_by_no_other() -> None:
    x, y = neighbours()
    with options(strict_provenance=True), allow(part=x[:50], first=x), launches() as log:
        put[(1,)](x, y, 5)
    assert set(log[0].buffers) == {"x_ptr/first", "y_ptr"}


def test_a_chosen_pointer_keeps_the_tensor_that_it_came_from() -> None:
    x, y = neighbours()
    with options(strict_provenance=True):
        select[(1,)](x, y, 1, 5)
        for second, at in ((0, 100), (1, -1), (1, 100)):
            with pytest.raises(OutOfBounds):
                select[(1,)](x, y, second, at)
    assert y.nonzero().tolist() == [[5]]


STRUCTURE = """.version 8.7
.target sm_90
.address_size 64
.visible .entry k(.param .align 8 .b8 s[24], .param .u64 end) {
.reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<5>;
ld.param.u64 %rd0, [s+8]; ld.param.u64 %rd1, [end]; ld.param.u32 %r1, [s];
LOOP: st.global.u32 [%rd0], %r1; add.u64 %rd0, %rd0, 4;
setp.lt.u64 %p1, %rd0, %rd1; @%p1 bra LOOP; ret; }"""


@pytest.mark.parametrize("more", [0, 4])
def test_addresses_in_structures_and_ends_of_tensors_are_addresses_of_the_tensor(more: int) -> None:
    x, y = neighbours()
    given = struct.pack("<QQQ", 9, x.data_ptr(), 5)
    with options(strict_provenance=True), allow(x, y):
        if more:  # the end of x is the beginning of y
            with pytest.raises(OutOfBounds):
                run_ptx(STRUCTURE, "k", (1,), (1,), [given, x.data_ptr() + 400 + more])
        else:
            run_ptx(STRUCTURE, "k", (1,), (1,), [given, x.data_ptr() + 396])
            assert x.view(torch.int32).tolist() == [9] * 99 + [0]
    assert not y.any()


@triton.jit
def shifted(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at))


def test_other_checks_see_the_memory_behind_two_names() -> None:
    storage = torch.arange(512.0)
    with options(strict_provenance=True, check_races=True):
        shifted[(2,)](storage[:256], storage[256:], BLOCK=128)
        with pytest.raises(Race):
            shifted[(2,)](storage[:256], storage[128:384], BLOCK=128)
    fresh = torch.zeros(256)
    with options(strict_provenance=True, uninitialised=[fresh]):
        with pytest.raises(UninitialisedRead, match="x_ptr at byte offset 0"):
            shifted[(2,)](fresh, storage[:256], BLOCK=128)
        shifted[(2,)](storage[:256], fresh, BLOCK=128)
        shifted[(2,)](fresh, storage[:256], BLOCK=128)


@pytest.mark.parametrize("asked", [False, True])
def test_the_record_and_the_alignment_of_a_launch_stay_what_they_are(asked: bool) -> None:
    storage = torch.arange(520.0)
    with options(strict_provenance=asked), launches() as log:
        shifted[(2,)](storage[1:257], storage[261:517], BLOCK=128)
    assert torch.equal(storage[261:517], torch.arange(1.0, 257.0))
    assert {name: (t.read, t.written) for name, t in log[0].buffers.items()} == {
        "x_ptr": (1024, 0),
        "y_ptr": (0, 1024),
    }


def test_tensors_larger_than_memory_have_room() -> None:
    x = virtual_tensor(3_000_000_000, torch.float32)
    with options(strict_provenance=True):
        put[(1,)](x, torch.ones(1), 2_999_999_999)
        with pytest.raises(OutOfBounds, match="of x_ptr"):
            put[(1,)](x, torch.ones(1), 3_000_000_000)
    assert x[-1] == 1


def test_an_address_that_comes_by_another_way_reaches_any_tensor() -> None:
    """Read as two halves: of such an address it is not known where it points."""
    text = """.version 8.7
    .target sm_90
    .address_size 64
    .visible .entry k(.param .u64 t) {
    .reg .b32 %r<9>; .reg .b64 %rd<9>;
    ld.param.u64 %rd0, [t]; ld.global.v2.u32 {%r0, %r1}, [%rd0]; mov.b64 %rd1, {%r0, %r1};
    st.global.u32 [%rd1+400], 7; ret; }"""
    x, y = neighbours()
    with options(strict_provenance=True), allow(x, y):
        run_ptx(text, "k", (1,), (1,), [table_of(x)])
    assert y.view(torch.int32)[0] == 7
