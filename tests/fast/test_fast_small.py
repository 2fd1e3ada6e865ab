"""Unscale, cast, accumulate, pack and the loss-scale rules equal the reference bit for bit."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from twinstep.fast.kernels.accumulate import accumulate_
from twinstep.fast.kernels.cast import cast_copy_
from twinstep.fast.kernels.loss_scale import (
    update_scale_dynamic_,
    update_scale_torch_,
    update_scale_wrapper_,
)
from twinstep.fast.kernels.pack import flatten_, unflatten_
from twinstep.fast.kernels.unscale import unscale_
from twinstep.parity.cases.fixed_inputs import anything, moderate
from twinstep.parity.expected.ulp import same
from twinstep.parity.operations import buffers, scales

pytestmark = pytest.mark.usefixtures("replay")

LAYOUTS = [[2049], [0, 70], [3, 0, 2048, 5000]]


def assert_all_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        assert bool(same(one, other).all()), (one, other)


@pytest.mark.parametrize("sizes", LAYOUTS)
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_unscale_equals_the_reference(sizes: list[int], bad: float | None, dtype: Any) -> None:
    grads = [anything(n, n, dtype) for n in sizes]
    grads = [torch.where(torch.isfinite(grad), grad, torch.ones_like(grad)) for grad in grads]
    if bad is not None:
        grads[-1][-1] = bad
    for found in (0.0, 1.0):
        flag, inverse = torch.tensor(found), torch.tensor(1 / 3)
        want, wanted_flag = buffers.unscale(grads, inv_scale=inverse, found_inf=flag)
        ours = [grad.clone() for grad in grads]
        unscale_(ours, inv_scale=inverse, found_inf=flag)
        assert_all_same([*ours, flag], [*want, wanted_flag])


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_cast_equals_the_reference(sizes: list[int], dtype: torch.dtype) -> None:
    sources = [anything(n, n, torch.float32) for n in sizes]
    copies = [torch.full((n,), 7, dtype=dtype) for n in sizes]
    (want,) = buffers.cast_copy(sources, copies)
    cast_copy_(sources, copies)
    assert_all_same(copies, want)


@pytest.mark.parametrize("sizes", LAYOUTS)
@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16, torch.float16])
def test_accumulate_equals_the_reference(
    sizes: list[int], into: torch.dtype, dtype: torch.dtype
) -> None:
    accumulators = [moderate(n, 1, into) for n in sizes]
    grads = [moderate(n, 2, dtype) for n in sizes]
    (want,) = buffers.accumulate(accumulators, grads)
    accumulate_(accumulators, grads)
    assert_all_same(accumulators, want)


def test_a_gradient_beyond_fp16_is_not_rounded_before_it_is_added(dtype: torch.dtype) -> None:
    """LLVM narrows an fp32 sum of bf16 and fp16 that is rounded to fp16, if it sees one."""
    accumulators = [torch.tensor([-60000.0, -math.inf], dtype=torch.float16)] * 2
    grads = [torch.tensor([70144.0, 3e38]).to(dtype)] * 2
    (want,) = buffers.accumulate(accumulators, grads)
    accumulators = [accumulator.clone() for accumulator in accumulators]
    accumulate_(accumulators, grads)
    assert_all_same(accumulators, want)
    accumulate_(accumulators[:1], grads[:1])
    assert_all_same(accumulators[:1], buffers.accumulate(want[:1], grads[:1])[0])


@pytest.mark.parametrize("sizes", [*LAYOUTS, [0], []])
@pytest.mark.parametrize("slot", [1, 16, 100])
def test_packing_equals_the_reference_and_comes_back(
    sizes: list[int], slot: int, dtype: torch.dtype
) -> None:
    tensors = [anything(n, n, dtype) for n in sizes]
    room = sum(-(-n // slot) * slot for n in sizes) + 2100
    flat = [torch.full((room,), math.nan, dtype=dtype)]
    (want,) = buffers.flatten(tensors, flat, slot=slot)
    flatten_(tensors, flat, slot=slot)
    assert_all_same(flat, want)
    back = [torch.full_like(tensor, 7) for tensor in tensors]
    unflatten_(flat, back, slot=slot)
    assert_all_same(back, tensors)


def test_packing_from_a_misaligned_buffer_equals_the_reference() -> None:
    tensors = [moderate(5000, 1, torch.float16), moderate(70, 2, torch.float16)]
    flat = [torch.full((6000,), 7.0, dtype=torch.float16)[3:]]
    (want,) = buffers.flatten(tensors, flat, slot=16)
    flatten_(tensors, flat, slot=16)
    assert_all_same(flat, want)


def scalars(**values: float) -> dict[str, Tensor]:
    """Controls by name: integers as int64, floats as float64, found_inf as fp32."""
    kinds = {int: torch.int64, float: torch.float64}
    made = {name: torch.tensor(v, dtype=kinds[type(v)]) for name, v in values.items()}
    made["found_inf"] = made["found_inf"].to(torch.float32)
    return made


HISTORIES = list(itertools.product((0.0, 1.0), (0, 3, 4, 8), (-1, 0, 3)))


@pytest.mark.parametrize(("found_inf", "cur_iter", "last"), HISTORIES)
@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0, 65536.0])
def test_the_rules_with_counters_equal_the_reference(
    scale: float, found_inf: float, cur_iter: int, last: int
) -> None:
    state = {"scale": scale, "cur_iter": cur_iter, "last_overflow_iter": last}
    constants = {"found_inf": found_inf, "scale_factor": 3.0, "scale_window": 4, "min_scale": 1.0}
    controls: dict[str, Any] = scalars(**state, **constants)
    want: Any = scales.update_scale_wrapper(**controls)
    update_scale_wrapper_(**controls)
    assert_all_same([controls[name] for name in state], list(want))
    for hysteresis, shift, options in itertools.product(
        (0, 1, 2), (0, 1, 2), itertools.product((True, False), repeat=2)
    ):
        more = {**state, "cur_hysteresis": hysteresis, "exhausted": 0}
        controls = dict(scalars(**more, **constants, delayed_shift=shift))
        names = ("consecutive_hysteresis", "raise_error_at_min_scale")
        flags: dict[str, Any] = dict(zip(names, options, strict=True))
        want = scales.update_scale_dynamic(**controls, **flags)
        update_scale_dynamic_(**controls, **flags)
        assert_all_same([controls[name] for name in more], list(want))


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
@pytest.mark.parametrize("tracker", [0, 1, 5])
@pytest.mark.parametrize("scale", [0.1, 1.0, 65536.0, 3e38])
def test_the_rule_of_torch_equals_the_reference(
    scale: float, tracker: int, found_inf: float
) -> None:
    state = {"scale": scale, "growth_tracker": tracker}
    constants = {"growth_factor": 2.0, "backoff_factor": 0.3, "growth_interval": 2}
    controls = scalars(**state, **constants, found_inf=found_inf)
    want = scales.update_scale_torch(**controls)
    update_scale_torch_(**controls)
    assert_all_same([controls[name] for name in state], list(want))
