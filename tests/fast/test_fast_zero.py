"""Fast ZeroOptimizer: edges that the reference's tests state hold here word for word."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.contract import test_checkpoints_elastic
from tests.helpers.zero_built import SIDE, built
from tests.reference import (
    test_reference_zero,
    test_reference_zero_options,
    test_reference_zero_steps,
)

OTHERS = "other ranks do not hear of it before the step's message; see test_fast_zero_refusals"
# Test → why it is another one here.
DIFFERENT = {
    "test_the_loss_is_scaled_in_fp32": "watches Tensor.backward, which is not what is called",
    "test_an_error_at_the_floor_is_that_of_all_ranks": "raises when read, and drops the gradients",
    "test_files_hold_plain_values_and_the_scale": "compares records that only the reference has",
    "test_a_sparse_gradient_of_one_rank_is_refused_on_all": OTHERS,
    "test_a_learning_rate_of_one_rank_that_is_no_number_is_refused_on_all": OTHERS,
    "test_ranks_with_other_scales_take_no_step": OTHERS,
}
MODULES = (
    test_reference_zero,
    test_reference_zero_options,
    test_reference_zero_steps,
    test_checkpoints_elastic,
)
STATED = {
    name: test
    for module in MODULES
    for name, test in vars(module).items()
    if name.startswith("test_") and callable(test)
}
pytestmark = pytest.mark.usefixtures("replay", "on_this_side")
globals().update({name: test for name, test in STATED.items() if name not in DIFFERENT})


@pytest.fixture
def on_this_side() -> Iterator[None]:
    token = SIDE.set("fast")
    yield
    SIDE.reset(token)


def test_every_test_that_is_another_one_here_is_known() -> None:
    assert STATED.keys() > DIFFERENT.keys()
    assert len(STATED) > 40


@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_dropped_is_freed(stage: int) -> None:
    """Hooks of parameters are a way round that the garbage collector does not see."""
    params, optimizer = built(None, inside="FusedAdam", partition_grads=stage == 2)
    held: list[weakref.ref[Any]] = [
        weakref.ref(optimizer),
        *(weakref.ref(param) for param in params),
    ]
    torch.autograd.backward(params[0].sum())
    optimizer.step()
    del params, optimizer
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
