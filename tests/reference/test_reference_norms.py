"""Norms over a whole model: every type, every filter, every split over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles.rational import FP32, FP64, rounded, rounded_root
from twinstep.contract.parallel import counts_in_norm, tensor_parallel_rank
from twinstep.parity.cases.fixed_inputs import anything, bits, moderate
from twinstep.parity.ranks.world import Rank, World
from twinstep.reference.norm import l2_norm
from twinstep.reference.optimizers.fp16 import FP16Optimizer
from twinstep.reference.optimizers.fp16_unfused import FP16UnfusedOptimizer
from twinstep.reference.optimizers.fused_lamb import FusedLamb
from twinstep.reference.optimizers.model_norm import Part, check_norm_type, norm_of_parts
from twinstep.reference.optimizers.parallelism import overflow_groups

TYPES = [1.0, 2.0, math.inf, 3.0, 0.5]


def norm(*tensors: Tensor, norm_type: float = 2.0) -> Tensor:
    return norm_of_parts([Part(tensors=tensors)], norm_type)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_l2_norm_is_that_of_the_operation(dtype: torch.dtype) -> None:
    for seed in range(4):
        tensors = [anything(40, seed, dtype).nan_to_num(1.0, 1.0, 1.0), moderate(7, seed, dtype)]
        assert bits(norm(*tensors)) == bits(l2_norm(tensors))


def test_l1_and_l2_are_the_rounded_real_sums() -> None:
    values = anything(60, 3, torch.float32).nan_to_num(1.0, 1.0, 1.0)
    real = [Fraction(value) for value in values.tolist()]
    one = rounded(Fraction(rounded(sum(map(abs, real), Fraction()), FP64)), FP32)
    squares = Fraction(rounded(sum((x * x for x in real), Fraction()), FP64))
    assert norm(values, norm_type=1.0).item() == one
    assert norm(values).item() == rounded(Fraction(rounded_root(squares, FP64)), FP32)


@pytest.mark.parametrize(
    ("norm_type", "wanted"), [(1.0, 7.0), (2.0, 5.0), (math.inf, 4.0), (3.0, 91 ** (1 / 3))]
)
def test_known_norms(norm_type: float, wanted: float) -> None:
    """Edge NM-9: upstream once squared L1 norms before adding them."""
    x, y = torch.tensor([3.0]), torch.tensor([-4.0]).half()
    assert norm(x, y, norm_type=norm_type).item() == pytest.approx(wanted, rel=1e-7)


@pytest.mark.parametrize("norm_type", TYPES)
def test_specials(norm_type: float) -> None:
    inf, nan, one = (torch.tensor([x]) for x in (-math.inf, math.nan, 1.0))
    assert norm(norm_type=norm_type).item() == 0.0
    assert norm(torch.zeros(0), torch.zeros(3), norm_type=norm_type).item() == 0.0
    assert norm(one, inf, norm_type=norm_type).item() == math.inf
    assert math.isnan(norm(inf, nan, one, norm_type=norm_type).item())


@pytest.mark.parametrize(("size", "norm_type"), [(1, 12.0), (300, 8.1), (300, 0.005)])
def test_a_norm_that_float64_cannot_hold_is_infinite(size: int, norm_type: float) -> None:
    """A power, their sum, or the root of it; Python raises at each of them."""
    assert norm(torch.full((size,), 1e38), norm_type=norm_type).item() == math.inf


@pytest.mark.parametrize("bad", [0.0, -2.0, math.nan])
def test_a_norm_type_that_is_none_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"but should be positive or infinite \[here\]"):
        check_norm_type(bad, "here")


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_splitting_over_ranks_does_not_matter(norm_type: float) -> None:
    values = anything(90, 8, torch.float32).nan_to_num(1.0, 1.0, 1.0)
    wanted = bits(norm(values, norm_type=norm_type))
    for cuts in ([40, 50], [1, 0, 89], [30, 30, 30]):
        pieces = torch.split(values, cuts)

        def run(rank: Rank, pieces: Sequence[Tensor] = pieces) -> list[int]:
            part = Part(tensors=[pieces[rank.number]], groups=[rank.group("data")])
            return bits(norm_of_parts([part], norm_type))

        assert World(len(cuts)).run(run) == [wanted] * len(cuts)


@pytest.mark.parametrize("place", ["experts", "replicas", "groups"])
def test_one_rank_with_a_nan_is_seen_by_all(place: str) -> None:
    def run(rank: Rank) -> float:
        group = rank.group("data")
        over: Any = {place: group if place == "replicas" else [group]}
        part = Part(tensors=[torch.tensor([(1.0, math.nan)[rank.number]])], **over)
        return norm_of_parts([part], 2.0).item()

    assert all(math.isnan(value) for value in World(2).run(run))


def unit(rank: Rank) -> SimpleNamespace:
    """A model-parallel unit of all ranks."""
    return SimpleNamespace(
        get_model_parallel_group=lambda: rank.group("data"),
        get_data_parallel_group=lambda: rank.group("data"),
        get_model_parallel_rank=lambda: rank.number,
    )


def stepped(
    mpu: SimpleNamespace,
    grads: Sequence[float],
    marks: Sequence[str],
    kind: str = "flat",
) -> FP16Optimizer | FP16UnfusedOptimizer:
    """One step of scalar parameters with these marks."""
    params = [torch.nn.Parameter(torch.zeros(1, dtype=torch.float16)) for _ in grads]
    for param, grad, mark in zip(params, grads, marks, strict=True):
        param.grad = torch.full((1,), grad, dtype=torch.float16)
        if mark:
            setattr(param, mark, True)
    inside = FusedLamb(params) if kind == "lamb" else torch.optim.SGD(params, lr=1.0)
    optimizer: FP16Optimizer | FP16UnfusedOptimizer
    if kind == "flat":
        optimizer = FP16Optimizer(inside, mpu=mpu, verbose=False)
    else:
        legacy = kind == "lamb"
        optimizer = FP16UnfusedOptimizer(inside, mpu=mpu, verbose=False, fused_lamb_legacy=legacy)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", ["flat", "unfused", "lamb"])
def test_every_element_of_a_model_over_two_ranks_counts_once(kind: str) -> None:
    """Edges NM-5, NM-8, UF-7: a replica counts on the first rank, what is split on both."""
    marks = ("", "model_parallel", "ds_pipe_replicated")

    def run(rank: Rank) -> float:
        grads = [2.0, (3.0, 6.0)[rank.number], 100.0]
        return stepped(unit(rank), grads, marks, kind).get_global_norm()

    assert World(2).run(run) == [7.0, 7.0]


def test_a_replica_that_first_has_a_gradient_late_is_still_counted_once() -> None:
    """Edges NM-6 and NM-7: what counts follows from the parameters, at every step anew."""
    late = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16))
    late.ds_pipe_replicated = True  # type: ignore[attr-defined]
    other = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16))
    optimizer = FP16Optimizer(torch.optim.SGD([late, other], lr=1.0))
    other.grad = torch.full((1,), 3.0, dtype=torch.float16)
    optimizer.step()
    assert optimizer.get_global_norm() == 3.0
    for param, grad in ((late, 100.0), (other, 4.0)):
        param.grad = torch.full((1,), grad, dtype=torch.float16)
    optimizer.step()
    assert optimizer.get_global_norm() == 4.0
    assert late.item() == -100.0


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    """Also where only one of them has a gradient at all (edge OV-5)."""

    def run(rank: Rank) -> bool:
        if rank.number == 0:
            return without_gradient(unit(rank)).overflow
        return stepped(unit(rank), [math.inf], [""]).overflow

    assert World(2).run(run) == [True, True]


def without_gradient(mpu: SimpleNamespace) -> FP16Optimizer:
    param = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16))
    optimizer = FP16Optimizer(torch.optim.SGD([param], lr=1.0), mpu=mpu, verbose=False)
    optimizer.step()
    return optimizer


def test_the_place_among_tensor_parallel_ranks_is_found_in_order() -> None:
    assert tensor_parallel_rank(None) == 0
    getters = [f"get_{kind}_parallel_rank" for kind in ("model", "slice", "tensor_model")]
    found = SimpleNamespace()
    for place, name in enumerate(getters, start=1):
        setattr(found, name, lambda place=place: place)
        assert tensor_parallel_rank(found) == place


@pytest.mark.parametrize(
    ("marks", "rank", "counts"),
    [
        ({}, 0, True),
        ({}, 1, False),
        ({"model_parallel": True}, 1, True),
        ({"tensor_model_parallel": True}, 1, True),
        ({"model_parallel": False}, 1, False),
        ({"ds_pipe_replicated": True}, 0, False),
        ({"ds_pipe_replicated": True, "model_parallel": True}, 1, False),
    ],
)
def test_who_counts(marks: dict[str, bool], rank: int, counts: bool) -> None:
    param = torch.zeros(1)
    for name, value in marks.items():
        setattr(param, name, value)
    assert counts_in_norm(param, rank) is counts


def test_overflows_are_agreed_among_those_who_may_differ() -> None:
    expert, model, data = object(), object(), object()
    mpu = SimpleNamespace(
        get_model_parallel_group=lambda: model, get_data_parallel_group=lambda: data
    )
    reduces, does_not = (SimpleNamespace(enable_backward_allreduce=x) for x in (True, False))
    find: Callable[..., object] = overflow_groups
    assert find(None, None, [expert]) == [expert]
    assert find(mpu, reduces, []) == [model]
    assert find(mpu, does_not, [expert]) == [expert, data, model]
    assert find(None, reduces, []) == []


@pytest.mark.parametrize("kind", ["flat", "unfused"])
def test_experts_of_all_ranks_count_and_their_overflow_is_agreed(kind: str) -> None:
    """Shared gradients are the same on both ranks; each rank holds an expert of its own."""

    def run(rank: Rank, grads: tuple[float, float]) -> tuple[float, bool]:
        shared, expert = (torch.nn.Parameter(torch.zeros(1).half()) for _ in range(2))
        expert.allreduce, expert.group_name = False, "e"  # type: ignore[attr-defined]
        make: Callable[..., FP16Optimizer] = (
            FP16Optimizer if kind == "flat" else FP16UnfusedOptimizer  # type: ignore[assignment]
        )
        inside = torch.optim.SGD([shared, expert], lr=1.0)
        optimizer = make(inside, expert_groups={"e": rank.group("data")}, verbose=False)
        shared.grad, expert.grad = (
            torch.full((1,), 2.0).half(),
            torch.full((1,), grads[rank.number]).half(),
        )
        optimizer.step()
        return optimizer.get_global_norm(), optimizer.overflow

    assert World(2).run(partial(run, grads=(3.0, 6.0))) == [(7.0, False)] * 2
    assert World(2).run(partial(run, grads=(3.0, math.inf))) == [(math.inf, True)] * 2
