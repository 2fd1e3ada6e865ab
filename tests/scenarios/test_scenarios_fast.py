"""Our own kernels in training: equal to the reference on every step, on the GPU or replayed."""

from __future__ import annotations

import pytest
import torch

from twinstep.scenarios import lockstep, train
from twinstep.scenarios.calls import answer_of, device_of, reference_answer
from twinstep.scenarios.model import Shape
from twinstep.scenarios.plan import Plan
from twinstep.scenarios.trace import first_difference
from twinstep.scenarios.trainers import OperationTrainer

SMALL = Shape(context=16, width=10, layers=1)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_fast_equals_reference_on_every_step_of_the_model(dtype: str) -> None:
    report = lockstep.run(Plan(dtype=dtype, steps=2))
    assert report.differences == []


@pytest.mark.parametrize("rule", ["static", "dynamic", "wrapper", "torch"])
def test_fast_equals_reference_under_every_loss_scale_rule(rule: str) -> None:
    report = lockstep.run(Plan(rule=rule, steps=14, shape=SMALL))
    assert report.differences == []
    assert (len(report.trace.skipped) >= 3) == (rule != "static")


def test_fast_equals_reference_with_the_gradients_of_three_micro_batches() -> None:
    assert lockstep.run(Plan(accumulate=3, steps=8, shape=SMALL)).differences == []


def test_two_separate_runs_of_the_two_sides_are_one_run() -> None:
    plan = Plan(steps=12, shape=SMALL)
    ours, theirs = train.run("fast", plan), train.run("reference", plan)
    assert first_difference(ours, theirs) is None
    assert ours.held_out == theirs.held_out


def test_the_fast_side_does_not_touch_the_call() -> None:
    trainer = OperationTrainer(Plan(dtype="bf16", shape=SMALL))
    (part,) = trainer.draw()
    call = trainer.mixed_step(part.grads)
    before = [tensor.clone() for tensors in call.lists.values() for tensor in tensors]
    with device_of("fast") as device:
        written = answer_of("fast", device)(call)
    after = [tensor for tensors in call.lists.values() for tensor in tensors]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert written.keys() == reference_answer(call).keys()
