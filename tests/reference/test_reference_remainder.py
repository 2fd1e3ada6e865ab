"""bf16 weights and 16-bit remainders hold fp32 masters, and move as they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from twinstep.fast.kernels.cpu import adam, adam_remainder
from twinstep.parity.cases.fixed_inputs import anything, moderate
from twinstep.reference.adam import adamw_step
from twinstep.reference.remainder import adamw_remainder_step, join_master, split_master

BRAIN, SINGLE = torch.bfloat16, torch.float32


def patterns() -> Tensor:
    """fp32 numbers with every upper half, and lower halves around both roundings."""
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234, 0xCAFE])
    bits = (torch.arange(2**16) << 16)[:, None] + lower
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(SINGLE).flatten()


def test_nothing_is_lost_but_the_payload_of_a_nan() -> None:
    masters = patterns()
    back = join_master(*split_master(masters))
    assert torch.equal(back.isnan(), masters.isnan())
    number = ~masters.isnan()
    assert torch.equal(back.view(torch.int32)[number], masters.view(torch.int32)[number])


def test_a_weight_is_the_nearest_and_a_tie_goes_away_from_zero() -> None:
    masters = patterns()
    weights, _ = split_master(masters)
    tie = (masters.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(
        weights[~tie].nan_to_num(nan=1.5), masters[~tie].to(BRAIN).nan_to_num(nan=1.5)
    )
    tied = masters[tie & masters.isfinite()]
    away = tied.double() * (1 + 2.0**-20)  # beyond the tie, below the next
    expected = torch.where(
        tied.abs() < 2.0**-126, weights[tie & masters.isfinite()], away.to(BRAIN)
    )
    assert torch.equal(weights[tie & masters.isfinite()], expected)


def numbers(lr: float, wd: float = 0.05, found_inf: float = 0.0) -> dict[str, Any]:
    hyper = {"lr": lr, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": wd}
    found = {name: torch.tensor(value, dtype=torch.float64) for name, value in hyper.items()}
    return {**found, "factor": torch.tensor(2.0**-7), "found_inf": torch.tensor(found_inf)}


def test_a_thousand_steps_are_those_of_fp32_masters() -> None:
    """Rates from 1e-8, where most steps change the remainder alone, to 30."""
    masters = moderate(1500, 1, SINGLE)
    weights, rest = split_master(masters)
    first, second, third, fourth = ([torch.zeros(1500)] for _ in range(4))
    counters = [[torch.tensor(0)] for _ in range(2)]
    still = 0
    for step in range(1000):
        grads = [(anything if step % 100 == 99 else moderate)(1500, 10 + step, BRAIN).nan_to_num()]
        rate = 10.0 ** (step % 10 - 8) * (30 if step % 97 == 0 else 1)
        given = numbers(rate, found_inf=float(step % 50 == 49))
        before = weights.clone()
        adam.adamw_step_(
            [masters], grads, first, second, [], counters[0], **given, bias_correction=True
        )
        adam_remainder.adamw_remainder_step_(
            [weights], grads, third, fourth, [rest], counters[1], **given, bias_correction=True
        )
        still += int(torch.equal(before, weights))
        joined = join_master(weights, rest)
        same = (joined.view(torch.int32) == masters.view(torch.int32)) | masters.isnan()
        assert same.all(), step
        assert torch.equal(joined.isnan(), masters.isnan())
    assert counters[0] == counters[1] == [torch.tensor(980)]
    assert masters.isfinite().float().mean() > 0.5
    assert still > 50  # steps that changed remainders alone


def test_the_reference_is_adamw_on_the_joined_masters() -> None:
    masters = anything(4097, 3, SINGLE)
    weights, rest = split_master(masters)
    masters = join_master(weights, rest)
    grads, first, second = (
        anything(4097, 4, BRAIN),
        moderate(4097, 5, SINGLE),
        anything(4097, 6, SINGLE),
    )
    lists = ([grads], [first], [second.abs()])
    one = adamw_step(
        [masters], *lists, [], [torch.tensor(3)], **numbers(0.01), bias_correction=True
    )
    other = adamw_remainder_step(
        [weights], *lists, [rest], [torch.tensor(3)], **numbers(0.01), bias_correction=True
    )
    joined = join_master(other[0][0], other[3][0])
    assert torch.equal(joined.nan_to_num(nan=1.5), one[0][0].nan_to_num(nan=1.5))
    for ours, theirs in ((other[1], one[1]), (other[2], one[2])):
        assert torch.equal(ours[0].nan_to_num(nan=1.5), theirs[0].nan_to_num(nan=1.5))


def test_a_skipped_step_keeps_every_bit() -> None:
    weights = torch.arange(2**16).to(torch.int16).view(BRAIN)
    rest = torch.arange(2**16).flip(0).to(torch.int16)
    lists = ([torch.ones(2**16)], [torch.ones(2**16)], [torch.ones(2**16)])
    found = adamw_remainder_step(
        [weights], *lists, [rest], [torch.tensor(3)], **numbers(0.1, 0.0, 1.0), bias_correction=True
    )
    assert torch.equal(found[0][0].view(torch.int16), weights.view(torch.int16))
    assert torch.equal(found[3][0], rest)
    assert found[4] == [torch.tensor(3)]


def test_lengths_that_differ_are_named() -> None:
    lists = ([torch.ones(2)], [torch.ones(2)], [torch.ones(2)])
    with pytest.raises(ValueError, match="remainders has 0 tensors, but should have 1 like params"):
        adamw_remainder_step(
            [torch.ones(2, dtype=BRAIN)],
            *lists,
            [],
            [torch.tensor(0)],
            **numbers(0.1),
            bias_correction=True,
        )
