"""FusedAdam of both sides against numbers worked by hand, and what upstream does differently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.helpers.battery import Subject
from tests.helpers.sides import SIDES

pytestmark = [
    pytest.mark.usefixtures("replay"),
    pytest.mark.parametrize("subject", [Subject(side, "FusedAdam") for side in SIDES], ids=str),
]

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def test_group_options_override_and_no_counter_is_kept_in_the_group(subject: Subject) -> None:
    a, b = Parameter(torch.ones(1)), Parameter(torch.ones(1))
    groups: list[dict[str, object]] = [{"params": [a]}, {"params": [b], "lr": 0.5}]
    optimizer = subject(groups, lr=0.25, eps=0.0)
    for p in (a, b):
        p.grad = torch.ones(1)
    optimizer.step()
    assert (a.item(), b.item()) == (0.75, 0.5)
    assert all("step" not in group for group in optimizer.param_groups)


def unit_steps(subject: Subject, **compat: bool) -> tuple[list[float], list[int]]:
    """Three parameters at 1, gradient 1, lr 0.1; the last one has no gradient in the third step."""
    params = [Parameter(torch.ones(1)) for _ in range(3)]
    optimizer = subject(params, lr=0.1, compat=compat)
    for step in range(3):
        for index, p in enumerate(params):
            p.grad = None if (step, index) == (2, 2) else torch.ones(1)
        optimizer.step()
    counters = [int(optimizer.state[p]["step"]) for p in params]
    return [p.item() for p in params], counters


def test_every_parameter_counts_for_itself(subject: Subject) -> None:
    values, counters = unit_steps(subject)
    assert counters == [3, 3, 2]
    assert values == pytest.approx([0.7, 0.7, 0.8], abs=1e-6)


def test_compat_shares_the_counter_of_the_last_parameter(subject: Subject) -> None:
    values, counters = unit_steps(subject, shared_step_counter=True)
    assert counters == [0, 1, 2]
    assert values == pytest.approx([0.64346, 0.64346, 0.8], abs=5e-6)


def mixed_unit_step(subject: Subject, **compat: bool) -> tuple[list[float], list[int]]:
    params: list[Parameter] = [Parameter(torch.ones(1, dtype=dtype)) for dtype in DTYPES]
    optimizer = subject(params, lr=0.1, compat=compat)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return [p.item() for p in params], [int(optimizer.state[p]["step"]) for p in params]


def test_dtypes_in_one_group_share_nothing(subject: Subject) -> None:
    values, counters = mixed_unit_step(subject)
    assert counters == [1, 1, 1]
    assert values == [torch.tensor(0.9).to(dtype).item() for dtype in DTYPES]


def test_compat_advances_the_shared_counter_once_for_each_dtype(subject: Subject) -> None:
    values, counters = mixed_unit_step(subject, shared_step_counter=True)
    assert counters == [0, 0, 3]
    assert values == pytest.approx([0.89990, 0.92578, 0.93612], abs=5e-6)


def tiny_gradient_steps(subject: Subject, dtype: torch.dtype, **compat: bool) -> tuple[Any, Any]:
    """An fp16 weight at 1 after a gradient of 2^-9, and then after a gradient of 0."""
    p = Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = subject([p], lr=2.0**-10, compat=compat)
    seen = []
    for grad in (2.0**-9, 0.0):
        p.grad = torch.full((1,), grad, dtype=torch.float16)
        optimizer.step()
        seen.append(p.item())
    assert optimizer.state[p]["exp_avg_sq"].dtype == dtype
    return seen[0], seen[1]


def test_a_tiny_fp16_gradient_never_moves_a_weight_by_more_than_the_learning_rate(
    subject: Subject,
) -> None:
    first, second = tiny_gradient_steps(subject, torch.float32)
    assert first == 1 - 2.0**-10
    assert 0 < first - second <= 2.0**-10


def test_compat_stores_moments_in_the_parameter_dtype_and_explodes(subject: Subject) -> None:
    """The stored second moment, 0.001 * 2^-18, is below half of the smallest fp16 number: 0.

    The step after it divides the first moment by eps alone.
    """
    first, second = tiny_gradient_steps(subject, torch.float16, moments_in_param_dtype=True)
    assert first == 1 - 2.0**-10
    assert first - second > 10.0


def test_l2_mode_is_honoured_on_every_device(subject: Subject) -> None:
    for adam_w_mode, wanted in ((True, 0.85), (False, 0.90)):
        p = Parameter(torch.ones(1))
        p.grad = torch.full((1,), 0.25)
        subject([p], lr=0.1, weight_decay=0.5, adam_w_mode=adam_w_mode).step()
        assert p.item() == pytest.approx(wanted, abs=1e-6)
