"""Optimizers in several threads: tables, staging and launches of each are its own."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from time import sleep
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import twinstep.replay
from tests.helpers.battery import HYPER, Subject, advance, fill, observed
from tests.helpers.lockstep import in_lock_step, switching_at_launches
from twinstep.fast.kernels.accumulate import accumulate_
from twinstep.fast.kernels.cast import cast_copy_
from twinstep.fast.kernels.pack import flatten_, unflatten_
from twinstep.fast.runtime.tables import (
    SHARED,
    AddressTable,
    TableCache,
    address_table,
    live_tensors,
    reachable,
)

CPU = torch.device("cpu")
SHAPES = (5, (3, 4), 17, 1)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("FusedAdam", {}),
    "lamb": ("FusedLamb", {}),
    "fp16": ("FP16Optimizer", {"clip_grad": 0.5}),
    "fp16 unfused": ("FP16UnfusedOptimizer", {"inside": "FusedLamb", "clip_grad": 0.5}),
    "bf16": ("BF16Optimizer", {"clip_grad": 0.5}),
}
PAIRS = [("adam", "adam"), ("adam", "bf16"), ("lamb", "fp16"), ("fp16 unfused", "fp16 unfused")]


def recorded(run: Callable[[], object]) -> tuple[object, list[object]]:
    """The result of a run, and what each of its launches touched and executed."""
    with twinstep.replay.launches() as log:
        found = run()
    return found, [(launch.kernel, launch.buffers, launch.opcodes) for launch in log]


def trained(kind: str, seed: int) -> str:
    """Everything that shows of an optimizer after three steps; gradients move."""
    name, options = KINDS[kind]
    subject = Subject("fast", name)
    params = subject.parameters(*SHAPES)
    groups = [{"params": params[:2], "lr": 0.1 * seed}, {"params": params[2:]}]
    optimizer = subject(groups, hyper=HYPER, **options)
    for step in range(3):
        fill(params, 10 * seed + step, bad=float("inf") if step == seed else None)
        optimizer.param_groups[0]["lr"] = 0.1 + 0.01 * step * seed
        advance(optimizer)
    return repr(observed(optimizer, params))  # NaNs are equal here


def moved(seed: int) -> object:
    """Tensors after the functions whose tables are in the common cache."""
    seen: list[object] = []
    for round_ in range(3):
        sources = [torch.arange(float(n + seed)) + round_ for n in (3, 0, 5)]
        copies = [torch.empty_like(source, dtype=torch.bfloat16) for source in sources]
        flat = torch.ones(64 * seed)
        cast_copy_(sources, copies)
        accumulate_(sources, copies)
        flatten_(sources, [flat], slot=16)
        unflatten_([flat], sources, slot=16)
        seen.append([tensor.tolist() for tensor in (*sources, *copies, flat)])
    return seen


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_two_optimizers_that_step_in_two_threads_step_as_alone(
    replay: None, monkeypatch: pytest.MonkeyPatch, first: str, second: str
) -> None:
    runs = [partial(recorded, partial(trained, *row)) for row in ((first, 1), (second, 2))]
    alone = [run() for run in runs]
    assert switching_at_launches(monkeypatch, *runs) == alone


def test_two_threads_that_push_each_others_tables_out_get_their_own(
    replay: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SHARED, "_limit", 1)
    runs = [partial(recorded, partial(moved, seed)) for seed in (1, 2)]
    alone = [run() for run in runs]
    assert switching_at_launches(monkeypatch, *runs) == alone


def test_tensors_are_within_reach_of_the_launches_of_their_thread() -> None:
    def reached(switch: Callable[[], None], own: Tensor) -> list[list[int]]:
        seen = []
        for _ in range(2):
            with reachable([[own]]):
                switch()
                seen.append([tensor.data_ptr() for tensor in live_tensors()])
            switch()
            seen.append([tensor.data_ptr() for tensor in live_tensors()])
        return seen

    tensors = [torch.zeros(1) for _ in range(3)]
    found = in_lock_step(*[partial(reached, own=tensor) for tensor in tensors])
    assert found == [[[tensor.data_ptr()], []] * 2 for tensor in tensors]


class Interrupted(OrderedDict[Any, Any]):
    """Another thread runs after every look."""

    def get(self, key: object, default: object = None) -> Any:
        """As of a dict."""
        found = super().get(key, default)
        sleep(0.0005)
        return found


@settings(max_examples=10)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=2, max_size=3))
def test_a_cache_gives_every_thread_the_table_of_its_key(asked: list[list[int]]) -> None:
    cache, scalars = TableCache(limit=1), [torch.tensor(float(i)) for i in range(3)]
    cache._tables = Interrupted()
    found: list[bool] = []

    def ask(keys: Sequence[int]) -> None:
        for key in keys:
            table = address_table([scalars[key]], cache)
            found.append(table.data.tolist() == [scalars[key].data_ptr()])

    threads = [threading.Thread(target=ask, args=(keys,), daemon=True) for keys in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [True] * sum(map(len, asked))


def test_what_two_threads_build_at_once_is_one_table_in_the_end() -> None:
    cache, scalar = TableCache(), torch.tensor(1.0)

    def found(switch: Callable[[], None]) -> Sequence[AddressTable]:
        def build() -> list[AddressTable]:
            switch()
            return [address_table([scalar], TableCache())]

        return cache.find(("one",), CPU, build)

    one, other = in_lock_step(found, found)
    assert one is other
    assert cache.built == 2
