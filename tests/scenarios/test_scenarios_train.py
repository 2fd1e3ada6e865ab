"""Training: repeatable to the bit, really learning, really overflowing, and alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from twinstep.scenarios import train
from twinstep.scenarios.calls import State, reference_answer
from twinstep.scenarios.plan import Plan
from twinstep.scenarios.trace import first_difference
from twinstep.scenarios.trainers import OperationTrainer


def grads_of(plan: Plan) -> list[Tensor]:
    with train.one_thread():
        trainer = OperationTrainer(plan)
        return trainer.reduce(trainer.draw(), reference_answer)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_same_plan_gives_same_bits(dtype: str) -> None:
    plan = Plan(dtype=dtype, steps=8)
    first, second = train.run("reference", plan), train.run("reference", plan)
    assert first_difference(first, second) is None
    assert first.header == second.header
    assert first.held_out == second.held_out


def test_another_seed_gives_another_run() -> None:
    ours, theirs = (train.run("reference", Plan(steps=1, seed=seed)) for seed in (0, 1))
    assert first_difference(ours, theirs) is not None


def test_training_leaves_global_state_alone() -> None:
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    train.run("reference", Plan(steps=1, dtype="fp32"))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_no_algorithm_in_use_is_nondeterministic(dtype: str) -> None:
    plan = Plan(dtype=dtype, steps=2, accumulate=2)
    usual = train.run("reference", plan)
    torch.use_deterministic_algorithms(True)
    try:
        strict = train.run("reference", plan)
    finally:
        torch.use_deterministic_algorithms(False)
    assert first_difference(usual, strict) is None


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    threads = torch.get_num_threads()
    runs = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            runs.append(train.run("reference", Plan(dtype="fp32", steps=2)))
    finally:
        torch.set_num_threads(threads)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_training_learns(dtype: str) -> None:
    before, after = train.run("reference", Plan(dtype=dtype, steps=40)).held_out
    assert abs(before - math.log(256)) < 0.5
    assert after < before - 1.5


def test_high_initial_scale_overflows_then_recovers_then_grows() -> None:
    trace = train.run("reference", Plan(steps=24))
    scales = [record.scale for record in trace.records]
    assert trace.skipped[:2] == [1, 2]
    assert scales[1] == scales[0]  # the first overflow only uses up hysteresis
    assert min(scales) < scales[0]
    assert any(later > earlier for earlier, later in zip(scales, scales[1:], strict=False))
    assert 2 < len(trace.skipped) < 20
    for record in trace.records:
        assert record.skipped == (not math.isfinite(record.norm))


@pytest.mark.parametrize(
    ("dtype", "rule", "scale"),
    [("bf16", "dynamic", 1.0), ("fp32", "dynamic", 1.0), ("fp16", "static", 2.0**12)],
)
def test_a_scale_that_stays_skips_nothing(dtype: str, rule: str, scale: float) -> None:
    trace = train.run("reference", Plan(dtype=dtype, rule=rule, steps=6))
    assert trace.skipped == []
    assert {record.scale for record in trace.records} == {scale}


@pytest.mark.parametrize(("rule", "after"), [("dynamic", 1), ("wrapper", 1 / 2), ("torch", 1 / 2)])
def test_every_rule_answers_the_first_overflow_in_its_own_way(rule: str, after: float) -> None:
    first, second = train.run("reference", Plan(steps=2, rule=rule)).records
    assert first.skipped
    assert second.scale == first.scale * after


def test_gradients_of_two_micro_batches_are_those_of_the_mean_loss() -> None:
    alone = grads_of(Plan(dtype="fp32"))
    together = grads_of(Plan(dtype="fp32", accumulate=2))
    with train.one_thread():
        trainer = OperationTrainer(Plan(dtype="fp32", accumulate=2))
        halves = trainer.draw()
    expected = [
        (torch.zeros_like(a) + a) + b for a, b in zip(halves[0].grads, halves[1].grads, strict=True)
    ]
    assert all(torch.equal(a, b) for a, b in zip(together, expected, strict=True))
    # The first of two is the only one of one, at half the weight.
    assert all(torch.equal(a / 2, b) for a, b in zip(alone, halves[0].grads, strict=True))


def test_an_overflow_in_one_micro_batch_skips_the_step() -> None:
    with train.one_thread():
        trainer = OperationTrainer(Plan(accumulate=3, dtype="bf16"))
        parts = trainer.draw()
        parts[1].grads[5].view(-1)[0] = math.inf
        grads = trainer.reduce(parts, reference_answer)
        before = trainer.state.clone()
        record = trainer.apply(reference_answer(trainer.mixed_step(grads)), parts)
    assert record.skipped
    assert all(torch.equal(a, b) for a, b in zip(before.params, trainer.state.params, strict=True))


def test_copies_are_the_rounded_masters() -> None:
    masters = [torch.tensor([1.0, 2.0 + 2.0**-12])]
    low = State.initial(masters, Plan(dtype="fp16"))
    assert low.copies[0].tolist() == [1.0, 2.0]
    assert low.weights is low.copies
    plain = State.initial(masters, Plan(dtype="fp32"))
    assert plain.weights is plain.params


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"dtype": "float8"}, "dtype='float8', but should be one of"),
        ({"rule": "hopeful"}, "rule='hopeful', but should be one of"),
        ({"optimizer": "sgd"}, "optimizer='sgd', but should be one of"),
        ({"broken": "no-seed"}, "broken='no-seed', but should be one of"),
        ({"steps": 0}, "steps=0, but should be at least 1"),
        ({"accumulate": 0}, "accumulate=0, but should be at least 1"),
        ({"scale_window": 0}, "scale_window=0, but should be at least 1"),
        ({"warm_up": 0}, "warm_up=0, but should be at least 1"),
        ({"seed": -1}, "seed=-1, but should be at least 0"),
        ({"broken": "no-masters", "dtype": "bf16"}, "goes with an optimizer class"),
        ({"optimizer": "adam", "broken": "no-masters"}, "and dtype='bf16'"),
    ],
)
def test_a_wrong_plan_is_refused_in_one_sentence(wrong: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Plan(**wrong)  # type: ignore[arg-type]


def test_an_unknown_side_is_refused() -> None:
    with pytest.raises(ValueError, match="side='slow', but should be one of"):
        train.run("slow", Plan(steps=1))
