"""Both sums of squares of LAMB are exact, whether or not the numbers fit into windows."""

import math

import pytest
import torch
from torch import Tensor

from twinstep.fast.kernels._arith import BETA1, BETA2, HEADER, INV_SCALE
from twinstep.fast.kernels._lamb_sweeps import SPAN, sweep_twice
from twinstep.fast.kernels._limbs import LIMBS, NONFINITE, ORIGIN
from twinstep.fast.kernels.lamb import WIDE, lamb_moments_kernel, lamb_weights_kernel

pytestmark = pytest.mark.usefixtures("replay")
TURNS = 2 * WIDE.value + 37  # two turns of whole tiles, and a tail


def both_sums(weights: Tensor, directions: Tensor) -> list[list[int]]:
    """Limbs of the squares of both: v is 1 and nothing decays, so the direction is m."""
    coefficients = torch.zeros(HEADER.value + 2)
    for place in (BETA1, BETA2, INV_SCALE):
        coefficients[place.value] = 1.0
    lists = [
        [weights.clone()],
        [torch.zeros_like(weights)],
        [directions],
        [torch.ones_like(weights)],
    ]
    found: list[Tensor] = []
    sweep_twice(
        (lamb_moments_kernel, lamb_weights_kernel),
        lambda limbs: found.append(limbs.clone()),
        lists,
        [],
        coefficients,
        {"EPS_INSIDE": False},
    )
    return [row.tolist() for row in found[0][0]]


def exact(x: Tensor) -> int:
    """Sum of squares, in units of 2**-298."""
    return sum(int(math.ldexp(value, 149)) ** 2 for value in x.tolist())


def total(limbs: list[int]) -> int:
    """Sum in limbs, in the same units."""
    whole = sum(limbs[j] << 32 * j for j in range(LIMBS.value))
    unit: int = 1 << 32 * ORIGIN.value - 298
    units, rest = divmod(whole, unit)
    assert rest == 0
    return units


def drawn(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def spread(count: int) -> Tensor:
    """Numbers far below the window of the first tile, and the smallest of all."""
    x = drawn(count, 3)
    x[WIDE.value + 5 :: 7] *= 2.0**-70
    x[-1] = 2.0**-149
    return x


def grown(count: int) -> Tensor:
    """Numbers far above what the first tile shows."""
    x = drawn(count, 4)
    x[: WIDE.value] *= 2.0**-90
    x[-1] = 3e38
    return x


ROWS = {
    "usual": drawn,
    "spread": lambda count, _: spread(count),
    "grown": lambda count, _: grown(count),
    "first tile empty": lambda count, seed: torch.cat(
        (torch.zeros(WIDE.value), drawn(count - WIDE.value, seed))
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_both_sums_are_exact(name: str) -> None:
    count = TURNS if name != "usual" else SPAN.value + WIDE.value + 3
    x, usual = ROWS[name](count, 1), drawn(count, 2)
    ours, other = both_sums(x, usual)
    assert (total(ours), total(other)) == (exact(x), exact(usual))
    other, ours = both_sums(usual, x)
    assert (total(other), total(ours)) == (exact(usual), exact(x))
    assert ours[NONFINITE.value] == other[NONFINITE.value] == 0


def test_a_tensor_off_16_bytes_is_summed_as_exactly() -> None:
    x = drawn(TURNS + 1, 5)[1:]
    assert x.data_ptr() % 16
    ours, _ = both_sums(torch.empty(TURNS + 1)[1:].copy_(x), drawn(TURNS, 6))
    assert total(ours) == exact(x)


@pytest.mark.parametrize("place", [3, TURNS - 1])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_one_number_that_is_not_finite_is_counted(value: float, place: int) -> None:
    x = drawn(TURNS, 7)
    x[place] = value
    _, limbs = both_sums(drawn(TURNS, 8), x)
    assert limbs[NONFINITE.value] == (1 if value == math.inf else 1 << 32)
