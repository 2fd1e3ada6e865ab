"""Optimizers and schedules from configs of DeepSpeed, chosen as its engine chooses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from twinstep.fast.deepspeed import from_config
from twinstep.parity.ranks.world import Rank, World

pytestmark = pytest.mark.usefixtures("replay")
FP16: dict[str, Any] = {"fp16": {"enabled": True}}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
CYCLE: dict[str, Any] = {
    "cycle_min_lr": 0.01,
    "cycle_max_lr": 0.1,
    "cycle_first_step_size": 3,
    "cycle_second_step_size": 2,
}
UNTESTED = {"zero_allow_untested_optimizer": True}
BACK = {"cycle_second_step_size": -1}


def adam(kind: str = "AdamW", **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": {"lr": 0.1, **params}}}


def stage(number: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": number, **keys}}


@pytest.mark.parametrize(
    ("config", "kind", "inside"),
    [
        ({**adam(), **FP16}, "FP16Optimizer", "FusedAdam"),
        ({**adam("Adam", torch_adam=True), **FP16}, "FP16UnfusedOptimizer", "AdamW"),
        ({**adam("Lamb"), **FP16}, "FP16UnfusedOptimizer", "FusedLamb"),
        ({**adam("SGD"), **BF16}, "FP16UnfusedOptimizer", "SGD"),
        ({**adam(), **BF16}, "FP16Optimizer", "FusedAdam"),
        ({**adam(), **BF16, **stage(1), **FP32}, "BF16Optimizer", "FusedAdam"),
        ({**adam(), **BF16, **stage(1)}, "ZeroOptimizer", "FusedAdam"),
        ({**adam(), **FP16, **stage(1, reduce_bucket_size=64)}, "ZeroOptimizer", "FusedAdam"),
        ({**adam(), **FP16, **stage(2)}, "ZeroOptimizer", "FusedAdam"),
        ({**adam("Lamb"), **FP16, **stage(2), **UNTESTED}, "ZeroOptimizer", "FusedLamb"),
        (adam(), "FusedAdam", ""),
    ],
    ids=str,
)
def test_the_class_is_that_of_deepspeed_and_trains(
    config: dict[str, Any], kind: str, inside: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer: Any
    optimizer, schedule = from_config(path, model)
    assert type(optimizer).__name__ == kind
    assert schedule is None
    if inside:
        assert type(optimizer.optimizer).__name__ == inside
    before = model.weight.detach().clone()
    loss = model(torch.ones(3, 4, dtype=model.weight.dtype)).float().pow(2).sum()
    getattr(optimizer, "backward", torch.autograd.backward)(loss)
    optimizer.step()
    moved = not torch.equal(before, model.weight)
    assert moved or optimizer.overflow


def test_scale_clip_and_decay_come_from_the_config() -> None:
    config = {**adam("Adam", adam_w_mode=False, weight_decay=0.5), "gradient_clipping": 0.25}
    config["fp16"] = {"enabled": True, "initial_scale_power": 4, "min_loss_scale": 2}
    optimizer: Any
    optimizer, _ = from_config(config, nn.Linear(2, 2))
    assert (optimizer.loss_scale, optimizer.clip_grad) == (16.0, 0.25)
    assert optimizer.optimizer.adam_w_mode is False
    config["optimizer"]["type"] = "AdamW"  # the name wins
    optimizer, _ = from_config(config, nn.Linear(2, 2))
    assert optimizer.optimizer.adam_w_mode is True
    config["fp16"]["loss_scale"] = 128
    optimizer, _ = from_config(config, nn.Linear(2, 2))
    assert (optimizer.loss_scale, optimizer.dynamic_loss_scale) == (128.0, False)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**adam(), **FP16, **stage(3)}, "asks for zero_optimization.stage 3, but should not"),
        ({**adam(), **FP16, **BF16}, "fp16 and bf16 at once"),
        (FP16, "no optimizer.type"),
        ({**adam("OneBitAdam"), **FP16}, "optimizer.type='OneBitAdam', but should be Adam"),
        ({**adam("Lamb"), **FP16, **stage(1)}, "asks for Lamb with ZeRO stage 1, but should not"),
        ({**adam("Lamb"), **BF16, **stage(1), **FP32}, "unless zero_allow_untested_optimizer"),
        ({**adam(max_grad_norm=1.0), **FP16}, "gradient_clipping is the key"),
        ({**adam(), **FP16, "scheduler": {"type": "TwoCycle"}}, "scheduler.type='TwoCycle'"),
        (
            {**adam(), **FP16, "scheduler": {"type": "OneCycle", "params": {**CYCLE, **BACK}}},
            "cycle_first_step_size=3 and cycle_second_step_size=-1, but should",
        ),
    ],
    ids=str,
)
def test_what_is_missing_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_config(config, nn.Linear(2, 2))


# Rates of DeepSpeed 0.19.8 after each of six steps, from its lr_schedules.
SCHEDULES: list[tuple[str, dict[str, Any], list[float]]] = [
    (
        "WarmupLR",
        {"warmup_num_steps": 4, "warmup_max_lr": 0.01},
        [0.0, 0.0, 0.005, 0.007924812503605782, 0.01, 0.01, 0.01],
    ),
    (
        "WarmupLR",
        {
            "warmup_num_steps": 3,
            "warmup_max_lr": 0.01,
            "warmup_min_lr": 0.001,
            "warmup_type": "linear",
        },
        [
            0.001,
            0.001,
            0.004,
            0.007,
            0.010000000000000002,
            0.010000000000000002,
            0.010000000000000002,
        ],
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 5, "warmup_num_steps": 2, "warmup_max_lr": 0.01},
        [0.0, 0.0, 0.01, 0.01, 0.006666666666666666, 0.003333333333333333, 0.0],
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 5, "warmup_num_steps": 2},
        [0.0, 0.0, 0.1, 0.0750025, 0.025007500000000012, 1e-05, 1e-05],
    ),
    (
        "LRRangeTest",
        {"lr_range_test_step_size": 2},
        [0.001, 0.0015, 0.002, 0.0025, 0.003, 0.0035, 0.004],
    ),
    (
        "LRRangeTest",
        {
            "lr_range_test_step_size": 2,
            "lr_range_test_staircase": True,
            "lr_range_test_step_rate": 0.5,
        },
        [0.001, 0.001, 0.0015, 0.0015, 0.002, 0.002, 0.0025],
    ),
    (
        "OneCycle",
        {**CYCLE, "decay_step_size": 2, "decay_lr_rate": 0.5},
        [0.01, 0.039999999999999994, 0.06999999999999999, 0.09999999999999999, 0.055, 0.01, 0.008],
    ),
    (
        "OneCycle",
        {**CYCLE, "cycle_first_step_size": 4, "cycle_first_stair_count": 2},
        [0.01, 0.01, 0.05500000000000001, 0.05500000000000001, 0.1, 0.05500000000000001, 0.01],
    ),
]


@pytest.mark.parametrize(("name", "params", "rates"), SCHEDULES, ids=str)
def test_rates_are_those_of_deepspeed(
    name: str, params: dict[str, Any], rates: list[float]
) -> None:
    config = {**adam(), **FP16, "scheduler": {"type": name, "params": params}}
    optimizer, schedule = from_config(config, nn.Linear(2, 2))
    assert schedule is not None
    found = [float(optimizer.param_groups[0]["lr"])]
    for _ in range(6):
        schedule.step()
        found.append(float(optimizer.param_groups[0]["lr"]))
    assert found == rates
    state = schedule.state_dict()
    schedule.step()
    last = schedule.get_last_lr()
    schedule.load_state_dict(state)
    schedule.step()
    assert schedule.get_last_lr() == last


def test_one_cycle_moves_the_first_beta_against_the_rate(caplog: pytest.LogCaptureFixture) -> None:
    """Numbers of DeepSpeed 0.19.8; the second beta is 0.99 there from the start."""
    params = {**CYCLE, "decay_step_size": 2, "decay_mom_rate": 0.05}
    config = {**adam(), **FP16, "scheduler": {"type": "OneCycle", "params": params}}
    optimizer, schedule = from_config(config, nn.Linear(2, 2))
    assert schedule is not None
    found = [optimizer.param_groups[0]["betas"]]
    for _ in range(10):
        schedule.step()
        found.append(optimizer.param_groups[0]["betas"])
    first = [0.8, 0.8666666666666667, 0.8333333333333334, 0.8, 0.8500000000000001, 0.9]
    first += [0.9225, 0.9450000000000001, 0.9675, 0.9900000000000001, 1.0125]
    assert found == [(beta, 0.99) for beta in first]
    assert not caplog.messages
    from_config({**config, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, nn.Linear(2, 2))
    assert "OneCycle moves no momentum: FP16UnfusedOptimizer has no betas" in caplog.messages


@pytest.mark.parametrize("more", [{}, stage(1)], ids=str)
def test_a_scale_of_fp16_that_is_off_is_no_warning(
    more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    off = {"fp16": {"enabled": False, "loss_scale": 128}}
    from_config({**adam(), **BF16, **off, **more}, nn.Linear(2, 2))
    assert not caplog.records


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({**adam(), **BF16, **stage(1)}, "ZeroOptimizer"),
        ({**adam(), **BF16, **stage(2)}, "ZeroOptimizer"),
        ({**adam(), **stage(2), "gradient_clipping": 0.5}, "ZeroOptimizer"),
        ({**adam(), **BF16, **stage(1), **FP32}, "BF16Optimizer"),
        ({**adam(), **BF16}, "FP16Optimizer"),
        ({**adam("Lamb"), **BF16}, "FP16UnfusedOptimizer"),
        (adam(), "FusedAdam"),
    ],
    ids=str,
)
def test_ranks_of_a_job_train_one_model_or_are_refused(config: dict[str, Any], kind: str) -> None:
    """Each begins with weights of its own, and has gradients of its own."""

    def one(rank: Rank) -> Any:
        model = nn.Linear(4, 1)
        nn.init.constant_(model.weight, 1.0 + rank.number)
        by_loop = kind != "ZeroOptimizer"
        if by_loop:
            with pytest.raises(ValueError, match="nothing averages the gradients of 2 ranks"):
                from_config(config, model)
        optimizer: Any = from_config(config, model, averaged=by_loop)[0]
        assert type(optimizer).__name__ == kind
        for _ in range(2):
            rows = torch.full((3, 4), 2.0**rank.number, dtype=model.weight.dtype)
            loss = model(rows).float().pow(2).sum()
            getattr(optimizer, "backward", torch.autograd.backward)(loss)
            if by_loop:
                averaged(optimizer, model)
            optimizer.step()
        return model.weight.flatten().tolist()

    first, second = World(2).run(one)
    assert first == second
    assert first[0] < 1.0


def averaged(optimizer: Any, model: nn.Module) -> None:
    """Gradients of a loop that averages them itself."""
    grads: Any = [param.grad for param in model.parameters()]
    if hasattr(optimizer, "get_grads_for_reduction"):
        grads = optimizer.get_grads_for_reduction()[0]
    for grad in grads:
        dist.all_reduce(grad, dist.ReduceOp.AVG)
