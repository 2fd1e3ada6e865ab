"""The parts of the GPU check, run small on replay: what they call exists, and they can say no."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from twinstep.benchmarks import engines, graph, large, sanitizer, timing
from twinstep.benchmarks.part import Broken
from twinstep.benchmarks.state import apply, bits, controls, mixed_controls, new_state
from twinstep.fast.kernels.adam import adamw_step_

CPU = torch.device("cpu")


def test_exact_kernels_are_found() -> None:
    names = [kernel.name for kernel in engines.exact_kernels()]
    assert len(names) == len(set(names)) >= 15


def test_cases_are_the_same_for_every_process() -> None:
    kernel = engines.exact_kernels()[0]
    one, other = list(engines.cases(kernel)), list(engines.cases(kernel))
    assert [label for label, _ in one] == [label for label, _ in other]
    for (_, mine), (_, theirs) in zip(one, other, strict=True):
        for name, tensors in mine.lists.items():
            assert all(map(torch.equal, map(bits, tensors), map(bits, theirs.lists[name])))


def test_two_processes_on_one_engine_agree() -> None:
    chosen = [kernel for kernel in engines.exact_kernels() if kernel.operation.name == "cast_copy"]
    figures = engines.compare_engines("replay", "replay", chosen[:1])
    assert figures["kernels"] == 1
    assert int(str(figures["elements"])) > 1000


def test_a_different_bit_a_flipped_zero_and_a_missing_output_are_found() -> None:
    one = {"k p[0]": torch.tensor([1.0, 0.0])}
    assert engines.differences(one, one) == []
    assert engines.differences(one, {"k p[0]": torch.tensor([1.0, -0.0])})
    assert engines.differences(one, {"k p[0]": torch.tensor([1.0000001, 0.0])})
    assert engines.differences(one, {})


def test_pieces_equal_the_whole(replay: None) -> None:
    assert large.check(CPU, numel=9001, piece=4096) == {"elements": 9001, "pieces": 3}


@pytest.mark.parametrize("place", [0, 4096, 9000])
def test_one_element_not_updated_is_found(
    replay: None, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    right: Callable[..., None] = adamw_step_

    def wrong(params: Sequence[Tensor], *lists: Sequence[Tensor], **given: object) -> None:
        before = params[0].clone()
        right(params, *lists, **given)
        if params[0].numel() == 9001:
            params[0][place] = before[place]

    monkeypatch.setattr(large, "adamw_step_", wrong)
    with pytest.raises(Broken, match="differs"):
        large.check(CPU, numel=9001, piece=4096)


def test_a_norm_that_misses_the_last_element_is_found(
    replay: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(grads: Sequence[Tensor], *, norm: Tensor, found_inf: Tensor) -> None:
        norm.copy_(grads[0][:-1].double().square().sum().sqrt())

    monkeypatch.setattr(large, "global_norm_", wrong)
    with pytest.raises(Broken, match=r"norm=5.0, but should be 13.0"):
        large.check_norm(torch.zeros(2001))


@pytest.mark.parametrize("sizes", [(38,), (33, 5)], ids=["flat", "list"])
def test_the_step_that_is_captured_updates_and_skips(replay: None, sizes: tuple[int, ...]) -> None:
    state, given = new_state(sizes, CPU), mixed_controls(CPU)
    for number in range(graph.OVERFLOW_AT + 2):
        before = state.clone()
        graph.prepare(state, number)
        graph.step(state, given)
        moved = not torch.equal(before.lists[0][0], state.lists[0][0])
        assert moved == (number != graph.OVERFLOW_AT)
        assert bool(given["found_inf"]) == (number == graph.OVERFLOW_AT)


def test_timed_work_is_the_work_it_is_named_after(replay: None) -> None:
    timing.update_work(1000, CPU)()
    timing.reduce_work(1000, CPU)()
    state = new_state([1000], CPU)
    before = state.clone()
    apply(adamw_step_, state, controls(CPU), bias_correction=True)
    assert not state.equals(before)


def test_tensors_apart_are_what_the_sanitizer_sees(replay: None) -> None:
    kernel = next(k for k in engines.exact_kernels() if k.operation.name == "cast_copy")
    _, case = next(engines.cases(kernel))
    sanitizer.call_apart(kernel, case, CPU)
