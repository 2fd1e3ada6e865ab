"""The norm is the exact one, whatever the grid, the order and the splitting."""

import math
import random

import pytest
import torch
from torch import Tensor

from twinstep.fast.kernels.clip import clip_coefficient_, clip_factor_
from twinstep.fast.kernels.reduce import global_norm_
from twinstep.parity.cases.fixed_inputs import anything, moderate
from twinstep.parity.expected.ulp import same
from twinstep.parity.operations import buffers, scales

pytestmark = pytest.mark.usefixtures("replay")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def norm_of(grads: list[Tensor], found_inf: float = 0.0) -> tuple[Tensor, float]:
    norm, flag = torch.tensor(-7.0), torch.tensor(found_inf)
    global_norm_(grads, norm=norm, found_inf=flag)
    return norm, flag.item()


def assert_exact(grads: list[Tensor], found_inf: float = 0.0) -> None:
    """Compare with the reference, which adds squares as real numbers."""
    norm, flag = norm_of(grads, found_inf)
    controls = {"norm": torch.tensor(0.0), "found_inf": torch.tensor(found_inf)}
    want, wanted_flag = buffers.global_norm(grads, **controls)
    assert bool(same(norm, want)), (norm, want)
    assert flag == wanted_flag.item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [[1], [4096], [4095], [9000], [0, 5, 4097, 0, 700]])
def test_a_norm_is_exact(dtype: torch.dtype, sizes: list[int]) -> None:
    for low in (-30, -6):
        assert_exact([moderate(n, n + low, dtype, low=low, high=12) for n in sizes])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_random_bits_is_exact(dtype: torch.dtype) -> None:
    for seed in range(8):
        grad = anything(1500, seed, dtype)
        assert_exact([torch.where(torch.isfinite(grad), grad, torch.zeros_like(grad))])


@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes_are_exact(dtype: torch.dtype) -> None:
    kinds = {2: torch.int16, 4: torch.int32}
    smallest = torch.ones(3, dtype=kinds[torch.empty(0, dtype=dtype).element_size()]).view(dtype)
    largest = torch.full((5000,), torch.finfo(dtype).max, dtype=dtype)
    for grads in (
        [smallest],
        [largest],
        [largest, smallest],
        [largest[:1], smallest],
        [],
        [-largest],
    ):
        assert_exact(grads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 4095, 4096, 8999])
def test_one_non_finite_gradient_decides(dtype: torch.dtype, bad: float, place: int) -> None:
    grad = moderate(9000, 1, dtype)
    grad[place] = bad
    assert_exact([grad])
    assert_exact([moderate(10, 2, dtype), grad])


def test_nan_wins_over_infinity_across_tensors() -> None:
    norm, flag = norm_of([torch.tensor([math.inf] * 9), torch.tensor([math.nan])])
    assert math.isnan(norm.item())
    assert flag == 1.0


def test_found_inf_is_never_cleared() -> None:
    assert norm_of([torch.ones(3)], found_inf=1.0)[1] == 1.0


def test_finite_gradients_whose_norm_is_infinite_are_no_overflow() -> None:
    norm, flag = norm_of([torch.full((4,), 3e38)])
    assert norm.item() == math.inf
    assert flag == 0.0


def test_ties_of_the_sum_round_to_even() -> None:
    # S = 2**52 + 2**-1 and 2**52 + 1 + 2**-1: half a unit in the last place of float64.
    half = [torch.tensor([2.0**26]), torch.tensor([0.5, 0.5])]
    assert_exact(half)
    assert_exact([*half, torch.tensor([1.0])])
    assert_exact([*half, torch.tensor([2.0**-100])])


def test_dtypes_mix_and_order_does_not_matter() -> None:
    grads = [moderate(900, seed, dtype, low=-20) for seed, dtype in enumerate(DTYPES * 2)]
    want, _ = norm_of(grads)
    assert_exact(grads)
    generator = random.Random(1)
    for _ in range(3):
        generator.shuffle(grads)
        assert bool(same(norm_of(grads)[0], want))
    split = [piece for grad in grads for piece in grad.tensor_split([7, 7, 500])]
    assert bool(same(norm_of(split)[0], want))


@pytest.mark.parametrize("norm", [0.0, 1.0, 123.4, 1e-8, math.inf, math.nan])
@pytest.mark.parametrize("max_norm", [-1.0, 0.0, 0.3, 1e9])
def test_factors_equal_the_reference(norm: float, max_norm: float) -> None:
    largest = torch.tensor(max_norm, dtype=torch.float64)
    for scale in (1.0, 3.0, 65536.0):
        factor = torch.tensor(9.0)
        controls = {"norm": torch.tensor(norm), "max_norm": largest}
        divisor = torch.tensor(scale, dtype=torch.float64)
        (want,) = scales.clip_factor(**controls, scale=divisor, factor=factor)
        clip_factor_(**controls, scale=divisor, factor=factor)
        assert bool(same(factor, want))
        (want,) = scales.clip_coefficient(**controls, factor=factor)
        clip_coefficient_(**controls, factor=factor)
        assert bool(same(factor, want))
