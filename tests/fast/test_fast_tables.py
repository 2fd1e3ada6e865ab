"""Pointer tables: what they say, and when they are built."""

import pytest
import torch
from torch import Tensor

from twinstep.fast.kernels.pack import offsets_of, region_table
from twinstep.fast.runtime.lists import FixedLists
from twinstep.fast.runtime.tables import (
    AddressTable,
    TableCache,
    TensorTable,
    address_table,
    chunk_pairs,
    live_tensors,
    reachable,
    tensor_tables,
)

CHUNK = 2048


def rows(table: TensorTable) -> dict[str, list[list[int]]]:
    """Take a table apart by the layout of `fast.kernels._layout`."""
    depth, count = len(table.dtypes), table.tensors
    head = table.data[: (depth + 3) * count].view(depth + 3, count).tolist()
    pairs = table.data[(depth + 3) * count :].view(-1, 2).tolist()
    assert len(pairs) == table.chunks
    return {
        "addresses": head[:depth],
        "numel": [head[depth]],
        "aligned": [head[depth + 1]],
        "slot": [head[depth + 2]],
        "pairs": pairs,
    }


def test_a_table_holds_addresses_sizes_slots_and_chunks() -> None:
    params = [torch.zeros(n) for n in (3, CHUNK + 1, 1)]
    grads = [torch.zeros(n, dtype=torch.float16) for n in (3, CHUNK + 1, 1)]
    (table,) = tensor_tables([params, grads], chunk=CHUNK, cache=TableCache())
    found = rows(table)
    assert found["addresses"] == [[t.data_ptr() for t in role] for role in (params, grads)]
    assert found["numel"] == [[3, CHUNK + 1, 1]]
    assert found["slot"] == [[0, 1, 2]]
    assert found["pairs"] == [[0, 0], [1, 0], [1, 1], [2, 0]]
    assert table.dtypes == (torch.float32, torch.float16)


@pytest.mark.parametrize("sizes", [[0], [1], [CHUNK - 1, CHUNK, CHUNK + 1], [0, 5, 0, 9 * CHUNK]])
def test_chunks_cover_every_element_once(sizes: list[int]) -> None:
    covered = [0] * len(sizes)
    for tensor, chunk in chunk_pairs(torch.tensor(sizes), CHUNK).tolist():
        assert chunk * CHUNK == covered[tensor]
        covered[tensor] = min(sizes[tensor], (chunk + 1) * CHUNK)
    assert covered == sizes


def test_chunks_go_past_two_to_the_31_elements() -> None:
    huge = 2**33 + 1
    pairs = chunk_pairs(torch.tensor([huge]), 2**20)
    assert len(pairs) == 2**13 + 1
    assert pairs[-1, 1].item() * 2**20 == huge - 1


def test_empty_tensors_are_left_out_and_keep_their_slot() -> None:
    tensors = [torch.zeros(n) for n in (0, 4, 0, 5)]
    (table,) = tensor_tables([tensors], chunk=CHUNK, cache=TableCache())
    assert rows(table)["slot"] == [[1, 3]]


def test_nothing_but_empty_tensors_gives_no_table() -> None:
    assert tensor_tables([[torch.zeros(0)]], chunk=CHUNK, cache=TableCache()) == []
    assert tensor_tables([[]], chunk=CHUNK, cache=TableCache()) == []


def test_every_dtype_combination_gets_its_own_table() -> None:
    dtypes = (torch.float16, torch.float32, torch.float16, torch.bfloat16)
    tensors = [torch.zeros(4, dtype=dtype) for dtype in dtypes]
    tables = tensor_tables([tensors], chunk=CHUNK, cache=TableCache())
    assert [rows(table)["slot"] for table in tables] == [[[0, 2]], [[1]], [[3]]]


def test_a_column_is_aligned_when_every_address_of_it_is() -> None:
    buffer = torch.zeros(64)
    assert buffer.data_ptr() % 16 == 0
    straight, crooked = buffer[:8], buffer[17:25]
    tables = tensor_tables([[straight, straight, crooked], [straight, crooked, straight]], chunk=8)
    assert rows(tables[0])["aligned"] == [[1, 0, 0]]


def test_a_table_is_built_once_for_the_same_tensors() -> None:
    cache = TableCache()
    tensors = [torch.zeros(4), torch.zeros(5)]
    first = tensor_tables([tensors], chunk=CHUNK, cache=cache)
    again = tensor_tables([[t.view(-1) for t in tensors]], chunk=CHUNK, cache=cache)
    assert again is first
    assert cache.built == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda t: [t[0], t[1].clone()],
        lambda t: [t[0], t[1][:4]],
        lambda t: [t[0], t[1].view(torch.int32).view(torch.float32)[1:]],
        lambda t: [t[0].view(torch.bfloat16)[:4], t[1]],
        lambda t: [t[1], t[0]],
    ],
    ids=["address", "size", "offset", "dtype", "order"],
)
def test_a_table_is_rebuilt_when_what_it_says_changes(other: object) -> None:
    cache = TableCache()
    tensors = [torch.zeros(4), torch.zeros(5)]
    tensor_tables([tensors], chunk=CHUNK, cache=cache)
    assert callable(other)
    tensor_tables([other(tensors)], chunk=CHUNK, cache=cache)
    assert cache.built == 2


@pytest.mark.parametrize(
    "other",
    [
        lambda tensor: tensor.clone(),
        lambda tensor: tensor.view(torch.int32),
        lambda tensor: tensor.t(),
        lambda tensor: tensor[:1],
    ],
)
def test_fixed_lists_are_made_anew_when_memory_or_layout_changes(other: object) -> None:
    fixed, param = FixedLists(), torch.zeros(4, 4)
    made = fixed.of([param], lambda: [[param]])
    assert fixed.of([param.detach()], lambda: [[param]]) is made
    assert callable(other)
    changed = other(param)
    assert fixed.of([changed], lambda: [[changed]])[0][0] is changed


def test_a_cache_forgets_what_was_used_longest_ago() -> None:
    cache = TableCache(limit=2)
    kept = [[torch.zeros(4)], [torch.zeros(5)], [torch.zeros(6)]]
    for tensors in (*kept, kept[1], kept[2]):
        tensor_tables([tensors], chunk=CHUNK, cache=cache)
    assert cache.built == 3
    tensor_tables([kept[0]], chunk=CHUNK, cache=cache)
    assert cache.built == 4


def test_step_counters_are_found_through_their_addresses() -> None:
    steps = [torch.tensor(3), torch.tensor(4)]
    table = address_table(steps, TableCache())
    assert isinstance(table, AddressTable)
    assert table.data.tolist() == [step.data_ptr() for step in steps]


def test_tensors_are_live_only_while_a_launch_may_reach_them() -> None:
    tensors: list[Tensor] = [torch.zeros(1)]
    assert live_tensors() == []
    with reachable([tensors]):
        assert live_tensors()[0] is tensors[0]
    assert live_tensors() == []


def test_regions_of_a_packed_buffer_meet_without_gaps() -> None:
    tensors = [torch.zeros(n) for n in (5, 0, 16, 3)]
    flat = torch.zeros(100)
    starts, end = offsets_of(tensors, 16)
    assert (starts, end) == ([0, 16, 16, 32], 35)
    found = rows(region_table(flat, tensors, starts, packs=True))
    targets = [(address - flat.data_ptr()) // 4 for address in found["addresses"][1]]
    assert list(zip(targets, found["slot"][0], strict=True)) == [(0, 16), (16, 16), (32, 68)]
