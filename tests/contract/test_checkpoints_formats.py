"""Older and smaller formats of the same classes, on both sides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.checkpoint_runs import started
from tests.helpers.sides import CLASSES, SIDES

pytestmark = pytest.mark.usefixtures("replay")
BOTH = pytest.mark.parametrize("side", SIDES)
WRAPPERS = pytest.mark.parametrize("kind", ["flat", "unfused"])


def saved(kind: str, **options: Any) -> dict[str, Any]:
    source = started("reference", kind, **options)
    source.train(range(2), at=(1,))
    state: dict[str, Any] = source.optimizer.state_dict()
    return state


@BOTH
@WRAPPERS
def test_whole_scales_and_no_clip_norm_are_taken(side: str, kind: str) -> None:
    """DeepSpeed 0.14 starts from an int, and its unfused class saves no clip norm (edge UF-6)."""
    state = {**saved(kind), "cur_scale": 8}
    del state["clip_grad"]
    run = started(side, kind, clip_grad=0.75)
    run.load(state)
    assert run.optimizer.loss_scale == 8.0
    assert run.optimizer.clip_grad == 0.75


@BOTH
@WRAPPERS
def test_a_static_scale_has_three_keys(side: str, kind: str) -> None:
    static: dict[str, Any] = {"dynamic_loss_scale": False, "static_loss_scale": 4.0}
    static |= {"dynamic_loss_args": None}
    state = saved(kind, **static)
    assert {"cur_scale", "cur_iter", "dynamic_loss_scale"} <= state.keys()
    assert not {"last_overflow_iter", "scale_factor", "scale_window"} & state.keys()
    run = started(side, kind, **static)
    run.load(state)
    assert run.optimizer.loss_scale == 4.0
    assert run.optimizer.state_dict()["cur_iter"] == 2


@BOTH
def test_a_flat_bf16_state_has_no_scale_and_ignores_one(side: str) -> None:
    """DeepSpeed 0.14 saves a scale in every dtype, 0.19.8 only with fp16."""
    brain: dict[str, Any] = {"low_precision_dtype": torch.bfloat16, "dynamic_loss_scale": False}
    state = saved("flat", **brain, dynamic_loss_args=None)
    assert "cur_scale" not in state
    run = started(side, "flat", **brain, dynamic_loss_args=None)
    run.load({**state, "dynamic_loss_scale": True, "cur_scale": 2.0, "cur_iter": 9})
    assert run.optimizer.loss_scale == 1.0


@BOTH
@WRAPPERS
def test_constants_of_the_rule_come_from_the_constructor(side: str, kind: str) -> None:
    """Edges LS-12, LS-13: the two that are written are for DeepSpeed; nobody reads them here."""
    state = saved(kind)
    assert state["scale_factor"] == 2.0
    assert state["scale_window"] == 2
    run = started(side, kind)
    run.load({**state, "scale_factor": 16.0, "scale_window": 1})
    assert run.optimizer.state_dict()["scale_window"] == 2
    for key in ("scale_factor", "scale_window"):
        state.pop(key)
    run.load(state)
    assert run.optimizer.state_dict()["scale_factor"] == 2.0


@BOTH
def test_an_entry_of_bf16_needs_no_more_than_masters_and_state(side: str) -> None:
    state = saved("bf16")
    for key in ("group_paddings", "partition_count", "param_slice_mappings", "clip_grad"):
        del state[key]
    run = started(side, "bf16", clip_grad=0.75)
    run.load(state)
    assert run.optimizer.clip_grad == 0.75
    (first, _) = run.optimizer.fp32_groups_flat_partition
    assert torch.equal(first, state["single_partition_of_fp32_groups"][0])


@BOTH
def test_a_renamed_model_is_the_same_model(side: str) -> None:
    state = saved("bf16")
    state["param_slice_mappings"] = [{"other": {"numel": 99, "start": 7}}, {}]
    started(side, "bf16").load(state)


@BOTH
def test_a_group_whose_parameters_are_frozen_goes_through_a_state(side: str) -> None:
    """It holds nothing inside, and its list of numbers is empty."""

    def made() -> tuple[torch.nn.Parameter, Any]:
        halves = [torch.nn.Parameter(torch.ones(n, dtype=torch.float16)) for n in (3, 2)]
        groups = [{"params": [half]} for half in halves]
        halves[1].requires_grad_(False)
        inside = CLASSES[side]["FusedAdam"](groups, lr=0.5)
        return halves[0], CLASSES[side]["FP16UnfusedOptimizer"](inside)

    trained, optimizer = made()
    optimizer.backward(trained.sum())
    optimizer.step()
    state = optimizer.state_dict()
    assert [group["params"] for group in state["optimizer_state_dict"]["param_groups"]] == [[0], []]
    fresh, other = made()
    other.load_state_dict(state)
    assert torch.equal(other.fp32_groups[0][0], optimizer.fp32_groups[0][0])
    assert not torch.equal(trained, torch.ones_like(trained))
    assert torch.equal(fresh, trained)
