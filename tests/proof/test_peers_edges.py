"""Edges of ZeRO that the edge table has of DeepSpeed 0.19.8, on its engine: Z-4, 20, 25, 27, 29.

Needs DeepSpeed 0.19.8 beside us, which `make peers` installs. `parity peers --edges` runs others.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from twinstep.parity.proof.peers.edge_engine import Sums, engine
from twinstep.parity.proof.peers.installed import deepspeed, group_of_one

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed; make peers installs it",
    ),
    pytest.mark.skipif(
        "PYTEST_XDIST_WORKER" in os.environ,
        reason="DeepSpeed takes one process group and port; make peers runs this alone",
    ),
]
STAGES = pytest.mark.parametrize("stage", [1, 2])
SUMS = pytest.mark.parametrize("sums", ["fp16", "fp32"])


@pytest.fixture(scope="module", autouse=True)
def _group_of_its_own() -> Iterator[None]:
    """One group for all tests of the file, and none left behind."""
    with group_of_one():
        yield


def trained(sizes: Sequence[int], stage: int, sums: str, micros: int = 1) -> tuple[Sums, Any]:
    """Weights that gradient descent at rate 1 moves, and the engine around them."""
    model = Sums(sizes)
    config = {
        "fp16": {"enabled": True, "loss_scale": 1},
        "zero_optimization": {"stage": stage},
        "data_types": {"grad_accum_dtype": sums},
        "gradient_accumulation_steps": micros,
    }
    return model, engine(model, torch.optim.SGD(model.parameters(), lr=1.0), config)


@STAGES
@SUMS
def test_z29_the_last_backward_counts_unless_sums_are_fp32(stage: int, sums: str) -> None:
    model, whole = trained([3], stage, sums)
    whole.backward(whole(1.0, 1))
    whole.backward(whole(2.0, 1))
    whole.step()
    assert 1.0 - model.weights[0][0].item() == (3.0 if sums == "fp32" else 2.0)


@STAGES
@SUMS
@pytest.mark.parametrize("sizes", [[0, 3], [3, 0, 2], [3, 0]])
def test_z27_empty_parameters_train_with_the_others(
    sizes: list[int], stage: int, sums: str
) -> None:
    model, whole = trained(sizes, stage, sums)
    whole.backward(whole(1.0, len(sizes)))
    whole.step()
    found = [weight.tolist() for weight in model.weights]
    assert found == [[float(place)] * size for place, size in enumerate(sizes)]


@STAGES
def test_z25_zero_grad_to_zeros_leaves_the_sums(stage: int) -> None:
    model, whole = trained([3], stage, "fp32", micros=2)
    whole.backward(whole(2.0, 1))
    whole.step()
    whole.optimizer.zero_grad(set_to_none=False)
    whole.backward(whole(4.0, 1))
    whole.step()
    assert 1.0 - model.weights[0][0].item() == 3.0


@STAGES
def test_z4_groups_after_the_first_show_no_state(stage: int) -> None:
    model = Sums([3, 4])
    groups = [{"params": [weight]} for weight in model.weights]
    config = {"fp16": {"enabled": True, "loss_scale": 1}, "zero_optimization": {"stage": stage}}
    whole: Any = engine(model, torch.optim.AdamW(groups), config)
    whole.backward(whole(1.0, 2))
    whole.step()
    view = deepspeed("deepspeed.utils").safe_get_full_optimizer_state
    assert view(model.weights[0], "exp_avg") is not None
    with pytest.raises(ValueError, match="exp_avg not found"):
        view(model.weights[1], "exp_avg")


def test_z20_a_closure_is_ignored() -> None:
    model, whole = trained([3], 2, "fp32")
    whole.backward(whole(1.0, 1))
    called: list[int] = []
    whole.optimizer.step(lambda: called.append(1))
    assert called == []
    assert model.weights[0][0].item() == 0.0
