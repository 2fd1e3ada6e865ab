"""LAMB over lists equals the reference bit for bit, on the compiled kernels."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import twinstep.reference.lamb
import twinstep.replay
from twinstep.fast.kernels.lamb import lamb_step_
from twinstep.parity.cases.fixed_inputs import moderate
from twinstep.parity.expected.ulp import same

pytestmark = pytest.mark.usefixtures("replay")

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
Lists = list[list[Tensor]]


def f64(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def controls(**changed: Tensor) -> dict[str, Any]:
    usual: dict[str, Any] = {"lr": f64(0.013), "beta1": f64(0.87), "beta2": f64(0.987)}
    usual |= {"eps": f64(3e-7), "weight_decay": f64(0.07)}
    usual |= {"max_coeff": f64(3.0), "min_coeff": f64(0.02)}
    usual |= {"factor": torch.tensor(0.37), "found_inf": torch.tensor(0.0)}
    usual |= {"bias_correction": True, "eps_inside_sqrt": False}
    return {**usual, **changed}


def lists_of(sizes: list[int], param: torch.dtype, grad: torch.dtype) -> Lists:
    """Params, grads, moments, bf16 copies and steps."""
    kinds = [param, grad, FP32, FP32, BF16]
    lists = [
        [moderate(n, 31 * role + slot, kind) for slot, n in enumerate(sizes)]
        for role, kind in enumerate(kinds)
    ]
    lists[3] = [v.abs() for v in lists[3]]
    return [*lists, [torch.tensor(3 * slot) for slot in range(len(sizes))]]


def clones(lists: Lists) -> Lists:
    return [[tensor.clone() for tensor in tensors] for tensors in lists]


def written(lists: Lists) -> Lists:
    return [lists[0], *lists[2:]]


def assert_equal_to_the_reference(lists: Lists, options: dict[str, Any]) -> Lists:
    ours = clones(lists)
    lamb_step_(*ours, **options)
    want = twinstep.reference.lamb.lamb_step(*clones(lists), **options)
    for role, (got, wanted) in enumerate(zip(written(ours), want, strict=True)):
        for slot, (one, other) in enumerate(zip(got, wanted, strict=True)):
            assert bool(same(one, other).all()), (role, slot, one, other)
    return ours


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("param", "grad"), [(FP32, BF16), (FP16, FP16), (FP32, FP32)])
def test_a_step_equals_the_reference(param: torch.dtype, grad: torch.dtype, inside: bool) -> None:
    lists = lists_of([1, 2049, 0, 16385, 600], param, grad)
    options = controls()
    options["eps_inside_sqrt"] = inside
    ours = assert_equal_to_the_reference(lists, options)
    assert not bool(same(ours[0][3], lists[0][3]).all())


def test_a_tail_with_eps_zero_does_not_reach_the_norm() -> None:
    lists = lists_of([5], FP32, FP32)
    ours = assert_equal_to_the_reference(lists, controls(eps=f64(0.0)))
    assert bool(torch.isfinite(ours[0][0]).all())


def test_weights_of_zero_take_an_unbounded_step() -> None:
    lists = lists_of([300], FP32, FP32)
    lists[0] = [torch.zeros(300)]
    assert_equal_to_the_reference(lists, controls(max_coeff=f64(0.5), min_coeff=f64(0.25)))


def test_a_direction_that_is_not_a_number_stays_visible() -> None:
    lists = lists_of([300, 40], FP32, FP32)
    lists[1][0][7] = math.nan
    ours = assert_equal_to_the_reference(lists, controls())
    assert bool(torch.isnan(ours[0][0]).all())
    assert not bool(torch.isnan(ours[0][1]).any())


def test_a_skipped_step_writes_nothing() -> None:
    lists = lists_of([300, 0, 17], BF16, BF16)
    ours = assert_equal_to_the_reference(lists, controls(found_inf=torch.tensor(1.0)))
    for got, before in zip(ours, lists, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, before, strict=True))


def test_a_step_is_four_launches() -> None:
    lists = lists_of([300, 5000], FP32, BF16)
    with twinstep.replay.launches() as log:
        lamb_step_(*lists, **controls())
    names = [launch.kernel for launch in log]
    assert names == [f"lamb_{part}_kernel" for part in ("prepare", "moments", "ratio", "weights")]


def test_wrong_arguments_are_refused_before_a_launch() -> None:
    lists = lists_of([3], FP32, FP32)
    with pytest.raises(TypeError, match="max_coeff is float32, but should be float64"):
        lamb_step_(*lists, **controls(max_coeff=torch.tensor(1.0)))
    with pytest.raises(ValueError, match="grads has 0 tensors, but should have 1"):
        lamb_step_(lists[0], [], *lists[2:], **controls())
