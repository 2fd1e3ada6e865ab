"""Adam's update on the CPU: quotients without divisions, and stores past the caches."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from twinstep.fast.kernels.cpu.adam import adamw_step_
from twinstep.fast.runtime import native
from twinstep.parity.cases.fixed_inputs import anything

SINGLE = torch.float32
FAR = 2**22  # elements, as in adam.cpp
# 1 - beta^t, the ends of the range of divisors and mantissas next to all ones and all zeros.
EARLY = [1 - beta**step for beta in (0.9, 0.95, 0.999) for step in (1, 3, 40)]
DIVISORS = [*EARLY, 1 - 2.0**-24, 0.5 + 2.0**-24, 2.0**-24, 2.0**-24 * (2 - 2.0**-23), 2.0**-25]


def numbers(**given: float) -> dict[str, Tensor]:
    """Controls of a step."""
    usual = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    found = {name: torch.tensor(value).double() for name, value in (usual | given).items()}
    return found | {"factor": torch.tensor(1.0), "found_inf": torch.tensor(0.0)}


def directions(means: Tensor, divisor: float) -> Tensor:
    """Quotients by one divisor, as the kernel has it: a step of length 1 from zero along them."""
    header = {"lr": 0, "factor": 2, "beta1": 4, "beta2": 5}  # b1 = b2 = 1, c1 = c2 = 0
    coefficients = torch.zeros(18)
    coefficients[list(header.values())] = 1.0
    coefficients[16:] = torch.tensor([divisor, 1.0])
    weights, grads, squares = torch.zeros_like(means), torch.zeros(1), torch.ones_like(means)
    grads = grads.expand_as(means).contiguous()
    kept = (weights, grads, means, squares, weights, coefficients)
    launched = native.library().adam_flat_kernel
    words = [tensor.data_ptr() for tensor in kept] + [means.numel(), 0, 0, 0, 0, 0, 1, 0, 1, 2]
    launched(*map(ctypes.c_int64, words))
    return -weights


@pytest.mark.parametrize("divisor", DIVISORS)
def test_quotients_are_rounded_as_divisions_are(divisor: float) -> None:
    """Of every mantissa; a power of two beside it changes nothing from 2^-100 to 2^100."""
    means = torch.arange(0x3F800000, 0x40000000, dtype=torch.int32).view(SINGLE)
    assert torch.equal(directions(means, divisor), means / torch.tensor(divisor))


@pytest.mark.parametrize("divisor", DIVISORS)
def test_quotients_of_any_bits_are_rounded_as_divisions_are(divisor: float) -> None:
    """Each block at another range: around the ends, zeros, subnormals, infinities, NaN."""
    ends = [2.0**power for power in (-149, -126, -101, -100, 100, 101, 127)]
    means = [anything(512, 7, SINGLE), torch.zeros(512), -torch.zeros(512)]
    means += [end * (1 + torch.arange(512) / 2**23) for end in ends]
    means += [torch.full((512,), value) for value in (torch.inf, -torch.inf, torch.nan)]
    found, wanted = (
        directions(torch.cat(means), divisor),
        torch.cat(means) / torch.tensor(divisor),
    )
    # From -0 a step of +0 is -0 and is negated: signs of zeros are not what is asked here.
    assert torch.equal((found + 0.0).nan_to_num(1.5), (wanted + 0.0).nan_to_num(1.5))


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_far_more_than_caches_hold_is_updated_as_its_parts_are(
    low: torch.dtype, shift: int
) -> None:
    size = FAR + 4321

    def lists(key: int) -> list[Tensor]:
        made = [torch.randn(size, generator=torch.Generator().manual_seed(at)) for at in range(4)]
        made[3].abs_()
        return [*made, torch.zeros(size + key, dtype=low)[key:]]

    whole, parts = lists(shift), lists(0)
    given: Any = {**numbers(), "bias_correction": True}
    every: Any = [[one] for one in (*whole, torch.tensor(3))]
    adamw_step_(*every, **given)
    for begin in range(0, size, FAR // 2):
        cut: Any = [[one[begin : begin + FAR // 2]] for one in parts]
        cut.append([torch.tensor(3)])
        adamw_step_(*cut, **given)
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)
