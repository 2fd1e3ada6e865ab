"""Index arithmetic past 2^31 elements: our kernels at both ends of 3 billion, virtually.

Both ends of every huge tensor hold the same small case, so one reference says what both must hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import twinstep.replay
from twinstep.parity.cases.case import Case, Recipe, evaluate
from twinstep.parity.cases.generate import generate
from twinstep.parity.operations.table import operation_named
from twinstep.parity.proof.corpus import triton_kernels
from twinstep.parity.proof.corpus.calls import AdamCall, kernel_from
from twinstep.parity.proof.corpus.wrong_triton import SHELF
from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import kernels
from twinstep.replay import OutOfBounds, ends_of, virtual_ends, virtual_tensor

register_house()
FAR = 3_000_000_007
SMALL = 300  # less than a chunk, more than two of the wrong kernel's blocks
ELEMENTWISE = ("sgd_step", "adam_step", "adamw_step", "unscale", "accumulate", "cast_copy")
ROW = {row.name: row for row in kernels()}


@pytest.fixture(autouse=True)
def _on_replay() -> Iterator[None]:
    twinstep.replay.activate()
    yield
    twinstep.replay.deactivate()


def case_of(operation: str, dtype: str, sizes: Sequence[int]) -> Case:
    contract = operation_named(operation, "here")
    options = {option.name: option.choices[-1] for option in contract.options}
    recipe = Recipe(layout="list", sizes=tuple(sizes), regime="ordinary", seed=3, options=options)
    return generate(contract, dtype, recipe)


def far_lists(lists: Mapping[str, Sequence[Tensor]]) -> dict[str, list[Tensor]]:
    return {name: virtual_ends(list(tensors), FAR) for name, tensors in lists.items()}


def assert_ends(
    far: Mapping[str, Sequence[Tensor]], wanted: Mapping[str, Sequence[Tensor]]
) -> None:
    for name, tensors in wanted.items():
        if name in far and len(tensors) and tensors[-1].dim():
            assert far[name][-1].numel() == FAR
            for end in ends_of(far[name][-1], tensors[-1].numel()):
                assert torch.equal(end, tensors[-1].reshape(-1)), name
            assert far[name][-1][FAR // 2] == 0


@pytest.mark.parametrize("sizes", [(SMALL,), (50, SMALL)], ids=["flat", "list"])
@pytest.mark.parametrize("operation", ELEMENTWISE)
def test_an_elementwise_kernel_is_right_past_32_bits(
    operation: str, sizes: tuple[int, ...]
) -> None:
    case = case_of(operation, "bf16", sizes)
    far = far_lists(case.lists)
    with twinstep.replay.options(only_ends=2):
        ROW[f"triton.{operation}"](*far.values(), **case.controls, **case.options)
    assert_ends(far, case.reference())


@pytest.mark.parametrize("operation", ["flatten", "unflatten"])
def test_packing_is_right_past_32_bits(operation: str) -> None:
    small = torch.arange(1.0, 1.0 + SMALL).to(torch.bfloat16)
    (source,) = virtual_ends([small], FAR)
    target = virtual_tensor(FAR, torch.bfloat16)
    with twinstep.replay.options(only_ends=2):
        ROW[f"triton.{operation}"]([source], [target], slot=1)
    assert_ends({"target": [target]}, {"target": [small]})


@pytest.fixture
def two_chunks_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many programs as walk over two chunks each: the first ends past 2^31, the last begins so.

    On a GPU a few hundred walk over thousands; what they compute is the same.
    """
    monkeypatch.setattr(
        "twinstep.fast.kernels.reduce.resident_programs", lambda _, chunks, each: -(-chunks // 2)
    )


@pytest.mark.parametrize("sizes", [(SMALL,), (50, SMALL)], ids=["flat", "list"])
@pytest.mark.usefixtures("two_chunks_each")
def test_the_norm_is_right_past_32_bits(sizes: tuple[int, ...]) -> None:
    case = case_of("global_norm", "bf16", sizes)
    *others, small = case.lists["grads"]
    far = far_lists(case.lists)
    with twinstep.replay.options(only_ends=3):
        ROW["triton.global_norm"](far["grads"], **case.controls)
    wanted = evaluate(case, {"grads": [*others, small, small]})
    assert case.controls["norm"].item() == wanted["norm"][0].item() > 0


@pytest.mark.usefixtures("two_chunks_each")
def test_a_whole_step_is_right_past_32_bits() -> None:
    case = case_of("mixed_step", "bf16", (SMALL,))
    twice = {name: [*tensors, *tensors] for name, tensors in case.lists.items()}
    wanted = {name: row[:1] for name, row in evaluate(case, twice).items()}
    far = far_lists(case.lists)
    with twinstep.replay.options(only_ends=2):
        ROW["triton.mixed_step"](*far.values(), **case.controls, **case.options)
    assert_ends(far, wanted)
    assert not torch.equal(ends_of(far["params"][0], SMALL)[1], case.lists["params"][0])
    assert case.controls["norm"].item() == wanted["norm"][0].item()


def test_offsets_in_int32_are_caught_with_their_line() -> None:
    entry = next(entry for entry in SHELF if entry.name == "offsets_in_int32")
    case = case_of("adamw_step", "bf16", (SMALL,))
    far = far_lists(case.lists)
    with twinstep.replay.options(only_ends=3), pytest.raises(OutOfBounds) as caught:
        entry.kernel(*far.values(), **case.controls, **case.options)
    text = Path(triton_kernels.__file__).read_text().splitlines()
    line = next(n for n, code in enumerate(text, 1) if "old = tl.load(p + at" in code)
    assert f"triton_kernels.py:{line}" in str(caught.value)
    head, tail = ends_of(far["params"][0], SMALL)
    assert torch.equal(tail, case.lists["params"][0].reshape(-1))


def test_the_same_kernel_with_wide_offsets_passes() -> None:
    case = case_of("adamw_step", "bf16", (SMALL,))
    far = far_lists(case.lists)
    with twinstep.replay.options(only_ends=3):
        kernel = kernel_from(AdamCall, triton_kernels.adamw, "wide")
        kernel(*far.values(), **case.controls, **case.options)
    assert_ends(far, case.reference())
