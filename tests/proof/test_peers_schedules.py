"""Schedules of configs beside DeepSpeed's own, drawn at random: the same rates and betas.

Needs DeepSpeed 0.19.8 beside us, which `make peers` installs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from twinstep.fast.deepspeed_schedules import SCHEDULES, schedule_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed; make peers installs it",
)
RATES = st.sampled_from([0.0, 1e-4, 0.01, 0.37])
COUNTS = st.integers(1, 9)
PARTS = st.sampled_from([None, 0, 1, 4, 7])
STAIRS = st.sampled_from([0, 2, 5])
PARAMS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "WarmupLR": {"warmup_min_lr": RATES, "warmup_max_lr": RATES, "warmup_num_steps": COUNTS},
    "WarmupDecayLR": {"total_num_steps": COUNTS, "warmup_num_steps": COUNTS},
    "WarmupCosineLR": {"total_num_steps": COUNTS, "warmup_num_steps": COUNTS},
    "LRRangeTest": {
        "lr_range_test_min_lr": RATES,
        "lr_range_test_step_size": COUNTS,
        "lr_range_test_staircase": st.booleans(),
    },
    "OneCycle": {
        "cycle_min_lr": RATES,
        "cycle_max_lr": RATES,
        "decay_lr_rate": RATES,
        "cycle_first_step_size": COUNTS,
        "cycle_second_step_size": PARTS,
        "cycle_first_stair_count": STAIRS,
        "cycle_second_stair_count": st.none() | STAIRS,
        "decay_step_size": st.integers(0, 3),
        "cycle_momentum": st.booleans(),
        "decay_mom_rate": RATES,
    },
}


def rates_of(
    make: Callable[..., Any], params: dict[str, Any], steps: int
) -> list[tuple[float, tuple[float, float]]]:
    """Rates and betas before the first step and after each."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = make(optimizer, params)
    found = []
    for _ in range(steps):
        group = optimizer.param_groups[0]
        found.append((group["lr"], group["betas"]))
        schedule.step()
    return found


@pytest.mark.parametrize("name", PARAMS)
@settings(max_examples=60)
@given(data=st.data())
def test_rates_are_those_that_deepspeed_computes(name: str, data: st.DataObject) -> None:
    params = {key: data.draw(values, key) for key, values in PARAMS[name].items()}
    theirs = vars(import_module("deepspeed.runtime.lr_schedules"))[name]
    wanted = rates_of(lambda optimizer, given: theirs(optimizer, **given), params, 25)
    own = rates_of(lambda optimizer, given: schedule_of(name, given, optimizer), params, 25)
    assert own == wanted


def test_every_schedule_that_deepspeed_names_is_here() -> None:
    named = import_module("deepspeed.runtime.lr_schedules").VALID_LR_SCHEDULES
    assert set(named) == set(SCHEDULES) == set(PARAMS)
