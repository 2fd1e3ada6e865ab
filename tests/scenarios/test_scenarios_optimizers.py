"""Training around the optimizer classes: both sides alike, and taken up again bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from twinstep.parity.registry.engines import engine_named
from twinstep.scenarios import calls, train
from twinstep.scenarios.model import Shape
from twinstep.scenarios.optimizers import optimizer_of
from twinstep.scenarios.plan import DTYPES, Plan
from twinstep.scenarios.precision import SHAPE
from twinstep.scenarios.trace import first_difference
from twinstep.scenarios.train import CheckpointUnfit
from twinstep.scenarios.trainers import ClassTrainer

TINY = Shape(context=8, width=6, layers=1)
KINDS = [
    ("adam", "fp16", "FP16Optimizer"),
    ("adam", "bf16", "BF16Optimizer"),
    ("adam", "fp32", "FusedAdam"),
    ("lamb", "fp16", "FP16UnfusedOptimizer"),
    ("lamb", "bf16", "FP16UnfusedOptimizer"),
    ("lamb", "fp32", "FusedLamb"),
]


@pytest.fixture(autouse=True)
def _on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own arithmetic differs between CPU and GPU; only steps are equal to the bit."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(calls, "engine", lambda **_: engine_named("replay"))


def plan(optimizer: str, dtype: str, **more: object) -> Plan:
    words = {"steps": 7, "accumulate": 2, "scale_window": 2, "held_out": 1, "rule": "wrapper"}
    words |= {"shape": TINY, "optimizer": optimizer, "dtype": dtype}
    return Plan(**{**words, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("side", ["reference", "fast"])
@pytest.mark.parametrize(("optimizer", "dtype", "name"), KINDS)
def test_a_dtype_gets_the_class_that_is_made_for_it(
    optimizer: str, dtype: str, name: str, side: str
) -> None:
    weights = [torch.ones(3, dtype=DTYPES[dtype]).requires_grad_()]
    found, _ = optimizer_of(side, plan(optimizer, dtype), ["only"], weights)
    assert type(found).__name__ == name
    assert side in type(found).__module__.split(".")


@pytest.mark.parametrize(("optimizer", "dtype"), [kind[:2] for kind in KINDS])
def test_a_run_begun_on_fast_and_ended_on_the_reference_is_the_references_run(
    optimizer: str, dtype: str, tmp_path: Path
) -> None:
    asked, saved = plan(optimizer, dtype), tmp_path / "run.pt"
    whole = train.run("reference", asked)
    part = train.run("fast", asked, stop=4, save=saved)
    ended = train.run("reference", asked, resume=saved)
    assert len(part.records) == 4
    assert first_difference(whole, ended) is None
    assert whole.held_out == ended.held_out
    assert bool(whole.skipped) == (dtype == "fp16")


@pytest.mark.parametrize(("optimizer", "dtype"), [("adam", "fp16"), ("adam", "bf16")])
def test_the_fast_side_goes_on_from_its_own_and_from_the_references_file(
    optimizer: str, dtype: str, tmp_path: Path
) -> None:
    asked = plan(optimizer, dtype)
    whole = train.run("fast", asked)
    for side in ("fast", "reference"):
        train.run(side, asked, stop=3, save=tmp_path / side)
        ended = train.run("fast", asked, resume=tmp_path / side)
        assert first_difference(whole, ended) is None


def test_a_schedule_made_after_the_load_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H16 of docs/reference/bugs.md: it begins at its first learning rate."""
    load = ClassTrainer.load_state_dict

    def forgetful(self: ClassTrainer, saved: Mapping[str, object]) -> None:
        first = self.schedule.base_lrs
        load(self, saved)
        for group, lr in zip(self.optimizer.param_groups, first, strict=True):
            group["lr"] = group["initial_lr"] = lr
        self.schedule = LambdaLR(self.optimizer, self.schedule.lr_lambdas[0])

    asked = plan("adam", "fp32")
    whole = train.run("reference", asked)
    train.run("reference", asked, stop=3, save=tmp_path / "run.pt")
    monkeypatch.setattr(ClassTrainer, "load_state_dict", forgetful)
    ended = train.run("reference", asked, resume=tmp_path / "run.pt")
    found = first_difference(whole, ended)
    assert found is not None
    assert "lr" in str(found)


@pytest.mark.gpu
@pytest.mark.parametrize(("optimizer", "dtype"), [kind[:2] for kind in KINDS])
def test_the_classes_train_on_a_gpu(optimizer: str, dtype: str) -> None:
    with calls.device_of("fast") as device:
        assert device.type == "cuda"
    asked = plan(optimizer, dtype, steps=60, accumulate=1, shape=SHAPE)
    before, after = train.run("fast", asked).held_out
    assert after < before - 0.5


def test_the_operation_is_taken_up_again_too(tmp_path: Path) -> None:
    asked = Plan(steps=6, accumulate=2, shape=TINY)
    train.run("reference", asked, stop=3, save=tmp_path / "run.pt")
    ended = train.run("reference", asked, resume=tmp_path / "run.pt")
    assert first_difference(train.run("reference", asked), ended) is None


def test_what_a_checkpoint_holds_is_needed(tmp_path: Path) -> None:
    asked = plan("adam", "fp32")
    whole = train.run("reference", asked)
    train.run("reference", asked, stop=3, save=tmp_path / "run.pt")
    for entry in ("weights", "optimizer", "schedule", "lesson", "step"):
        saved = torch.load(tmp_path / "run.pt", weights_only=True)
        early = tmp_path / "early.pt"
        train.run("reference", asked, stop=1, save=early)
        saved["learner"][entry] = torch.load(early, weights_only=True)["learner"][entry]
        torch.save(saved, tmp_path / "mixed.pt")
        ended = train.run("reference", asked, resume=tmp_path / "mixed.pt")
        assert first_difference(whole, ended) is not None, entry


def test_a_checkpoint_of_another_plan_is_refused(tmp_path: Path) -> None:
    train.run("reference", plan("adam", "fp32"), stop=1, save=tmp_path / "run.pt")
    with pytest.raises(CheckpointUnfit, match="accumulate=2, but should have accumulate=1"):
        train.run("reference", plan("adam", "fp32", accumulate=1), resume=tmp_path / "run.pt")


@pytest.mark.parametrize("content", [b"", b"no checkpoint", None])
def test_a_file_that_is_no_checkpoint_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    if content is None:
        torch.save({"format": "another"}, path)
    else:
        path.write_bytes(content)
    with pytest.raises(CheckpointUnfit, match="is no checkpoint of a scenario"):
        train.run("reference", plan("adam", "fp32"), resume=path)


def test_the_learning_rate_rises_and_falls() -> None:
    records = train.run("reference", plan("adam", "fp32", steps=30)).records
    asked = plan("adam", "fp32", steps=30)
    rates = [record.lr for record in records]
    assert rates == [asked.lr * asked.share(step) for step in range(1, 31)]
    assert rates.index(max(rates)) == 9
    assert rates[-1] == pytest.approx(asked.last * asked.lr)


def test_micro_batches_make_a_mean() -> None:
    asked = plan("adam", "fp32", steps=1)
    with train.one_thread():
        trainer = ClassTrainer(asked, "reference", calls.CPU)
        weights = trainer.weights
        losses = [trainer.loss(weights, windows) for windows in trainer.micro_batches()]
        grads = torch.autograd.grad((losses[0] + losses[1]) / 2, weights)
        norm = torch.cat([grad.flatten() for grad in grads]).double().norm()
    (record,) = train.run("reference", asked).records
    assert record.loss == sum(float(loss.detach()) for loss in losses) / 2
    assert record.norm == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.parametrize("rule", ["static", "dynamic", "wrapper", "torch"])
def test_every_rule_reaches_the_optimizer(rule: str) -> None:
    trace = train.run("reference", plan("adam", "fp16", rule=rule, steps=3, accumulate=1))
    first, second, _ = trace.records
    if rule == "static":
        assert trace.skipped == []
    else:
        assert first.skipped
        assert second.scale == first.scale * (1.0 if rule == "dynamic" else 0.5)
