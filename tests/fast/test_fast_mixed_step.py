"""A whole step: three launches, no torch arithmetic, nothing compiled or uploaded twice."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.costs import Operators, compilations
from twinstep.contract.compat import CORRECT, Compat
from twinstep.contract.errors import MinimumLossScale
from twinstep.fast.kernels.finalise import Finish
from twinstep.fast.kernels.mixed_step import mixed_step_
from twinstep.fast.optimizers.driver import StepDriver
from twinstep.fast.optimizers.fused_adam import FusedAdam
from twinstep.fast.optimizers.group_tensors import GroupTensors
from twinstep.fast.optimizers.parallelism import Gradients, NormBucket
from twinstep.fast.optimizers.scalers import LossScale, LossScaling
from twinstep.parity.cases.fixed_inputs import moderate
from twinstep.parity.expected.ulp import same
from twinstep.parity.operations.steps import mixed_step

pytestmark = pytest.mark.usefixtures("replay")

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
WRITTEN = (
    "scale",
    "cur_iter",
    "last_overflow_iter",
    "cur_hysteresis",
    "growth_tracker",
    "exhausted",
    "norm",
    "found_inf",
)
RULES = ("static", "dynamic", "wrapper", "torch")
HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay")
CONSTANTS = ("max_norm", "scale_factor", "scale_window", "min_scale", "delayed_shift")
CONTROLS = (*HYPER, *CONSTANTS, "backoff_factor", *WRITTEN)


class Stepper:
    """The driver of a step, around masters that are handed in."""

    def __init__(
        self,
        lists: list[list[Tensor]],
        scaling: LossScaling,
        compat: Compat,
        **options: Any,
    ) -> None:
        params, *_ = lists
        self.lists, self.device = lists, params[0].device
        self.steps = list(torch.zeros(len(params), dtype=torch.int64, device=self.device))
        self.inner = FusedAdam(params, **options)
        self.scaler = LossScale(scaling, scaling.rule, compat)
        finish = Finish(
            rule=scaling.rule,
            consecutive_hysteresis=scaling.consecutive_hysteresis,
            raise_error_at_min_scale=scaling.raise_error_at_min_scale,
            growth_counts_this_step=compat.growth_counts_this_step,
            unscale_with_updated_scale=compat.unscale_with_updated_scale,
        )
        self.driver = StepDriver(self.device, self.scaler, finish, 2.0)
        self.sync_hyperparameters()

    def sync_hyperparameters(self) -> None:
        """Send changed hyper-parameters."""
        self.driver.sync_hyperparameters(self.inner, 2.0)

    def control(self, name: str) -> Tensor:
        """A control, in whichever block it lies."""
        (block,) = self.driver._hyper
        return (block if name in HYPER else self.driver.control)[name]

    def step(self, grads: list[Tensor]) -> None:
        """Take one step."""
        params, first, second, copies = self.lists
        lists = [params, grads, first, second, *([copies] if copies else [])]
        group = GroupTensors(lists=lists, steps=self.steps, bias_correction=True)
        self.sync_hyperparameters()
        self.driver.run(Gradients(shares=[NormBucket(tensors=grads)]), [group], self.inner)


class Training:
    """Master weights, moments and copies on both sides, and gradients that both see."""

    def __init__(
        self, sizes: list[int], low: torch.dtype | None, scaling: LossScaling, **compat: bool
    ) -> None:
        self.params = [moderate(n, slot, FP32) for slot, n in enumerate(sizes)]
        self.moments = [[torch.zeros(n) for n in sizes] for _ in range(2)]
        self.copies = [p.to(low) for p in self.params] if low else []
        self.grad_dtype = low or FP32
        ours = [[t.clone() for t in role] for role in (self.params, *self.moments, self.copies)]
        self.step = Stepper(
            ours,
            scaling,
            Compat(**compat),
            lr=0.013,
            betas=(0.87, 0.987),
            eps=1e-7,
            weight_decay=0.03,
        )
        self.ours = ours
        self.lists = [self.params, *self.moments, self.copies, [torch.tensor(0) for _ in sizes]]
        self.controls: dict[str, Any] = {name: self.step.control(name).clone() for name in CONTROLS}
        self.options: dict[str, Any] = {
            "adam_w_mode": True,
            "bias_correction": True,
            "rule": scaling.rule,
            "consecutive_hysteresis": scaling.consecutive_hysteresis,
            "raise_error_at_min_scale": scaling.raise_error_at_min_scale,
        }
        self.compat = Compat(**compat)

    def grads(self, seed: int, bad: float | None = None) -> list[Tensor]:
        """Return gradients, the last of them with one element that is not finite."""
        grads = [
            moderate(p.numel(), 100 * seed + slot, self.grad_dtype)
            for slot, p in enumerate(self.params)
        ]
        if bad is not None:
            grads[-1][-1] = bad
        return grads

    def both(self, grads: list[Tensor]) -> None:
        """Step both sides and compare everything that a step writes."""
        params, exp_avgs, exp_avg_sqs, copies, steps = self.lists
        results: Any = mixed_step(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            copies,
            steps,
            **self.controls,
            **self.options,
            compat=self.compat,
        )
        self.lists = list(results[:5])
        self.controls |= dict(zip(WRITTEN, results[5:], strict=True))
        self.step.step(grads)
        for ours, theirs in zip([*self.ours, self.step.steps], self.lists, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert bool(same(one, other).all()), (one, other)
        for name in WRITTEN:
            assert bool(same(self.step.control(name), self.controls[name])), name


@pytest.mark.parametrize("low", [None, FP16, BF16])
@pytest.mark.parametrize("sizes", [[3000], [700, 0, 2048, 5]], ids=["flat", "list"])
@pytest.mark.parametrize("rule", RULES)
def test_steps_equal_the_reference(rule: str, sizes: list[int], low: Any) -> None:
    scaling = LossScaling(rule=rule, init_scale=64.0, scale_window=2, delayed_shift=2)
    training = Training(sizes, low, scaling)
    bads = [None, None, math.inf, math.nan, None, None, None]
    for seed, bad in enumerate(bads):
        training.both(training.grads(seed, bad))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("field", ["growth_counts_this_step", "unscale_with_updated_scale"])
def test_compat_steps_equal_the_reference(rule: str, field: str) -> None:
    scaling = LossScaling(rule=rule, init_scale=64.0, scale_window=2, delayed_shift=1)
    training = Training([70], FP16, scaling, **{field: True})
    for seed, bad in enumerate([None, None, math.inf, None, None, None]):
        training.both(training.grads(seed, bad))


def test_an_overflow_at_the_floor_stops_the_rule_until_the_host_has_seen_it() -> None:
    scaling = LossScaling(init_scale=1.0, delayed_shift=1)
    training = Training([5], FP16, scaling)
    training.both(training.grads(0, math.inf))
    with pytest.raises(MinimumLossScale, match=r"overflow at loss scale 1\.0"):
        training.step.scaler.raise_if_exhausted()
    training.controls["exhausted"].zero_()
    training.both(training.grads(1))


def test_changed_hyper_parameters_reach_the_next_step() -> None:
    training = Training([600], FP16, LossScaling(init_scale=4.0))
    training.both(training.grads(0))
    training.step.inner.param_groups[0] |= {"lr": 0.5, "betas": (0.2, 0.987)}
    training.controls["lr"] = torch.tensor(0.5, dtype=torch.float64)
    training.controls["beta1"] = torch.tensor(0.2, dtype=torch.float64)
    training.both(training.grads(1))


@pytest.mark.parametrize("sizes", [[3000], [700, 0, 2048, 5]], ids=["flat", "list"])
def test_a_step_is_three_launches(sizes: list[int]) -> None:
    import twinstep.replay

    training = Training(sizes, BF16, LossScaling())
    for seed in range(2):
        with twinstep.replay.launches() as log:
            training.step.step(training.grads(seed))
        assert len(log) == 3


def test_a_step_does_no_torch_arithmetic_on_its_tensors() -> None:
    training = Training([3000, 1000], FP16, LossScaling())
    grads = training.grads(0)
    with Operators(1000, besides=()) as operators:
        training.step.step(grads)
    assert operators.large == []


def test_the_count_of_torch_operators_notices_one() -> None:
    with Operators(1000, besides=()) as operators:
        torch.zeros(1000).mul_(2.0)
    assert "mul_" in operators.large


@pytest.mark.parametrize("sizes", [[3000], [700, 0, 2048, 5]], ids=["flat", "list"])
def test_a_second_step_compiles_and_uploads_nothing(sizes: list[int]) -> None:
    training = Training(sizes, FP16, LossScaling())
    grads = training.grads(0)
    training.step.step(grads)
    built = training.step.driver.cache.built
    with compilations() as names:
        training.step.step(grads)
    assert names == []
    assert training.step.driver.cache.built == built


def test_another_length_compiles_nothing() -> None:
    training = Training([3000], FP16, LossScaling())
    training.step.step(training.grads(0))
    with compilations() as names:
        for size in (1, 16, 2048, 4097):
            other = Training([size], FP16, LossScaling())
            other.step.step(other.grads(0))
    assert names == []


def test_the_function_over_loose_controls_equals_the_reference() -> None:
    training = Training([700, 3], BF16, LossScaling(init_scale=8.0))
    params, exp_avgs, exp_avg_sqs, copies, steps = training.lists
    grads = training.grads(3)
    options = training.controls | training.options
    want: Any = mixed_step(params, grads, exp_avgs, exp_avg_sqs, copies, steps, **options)
    mixed_step_(params, grads, exp_avgs, exp_avg_sqs, copies, steps, **options)
    for ours, theirs in zip((params, exp_avgs, exp_avg_sqs, copies, steps), want[:5], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert bool(same(one, other).all())
    for name, wanted in zip(WRITTEN, want[5:], strict=True):
        assert bool(same(training.controls[name], wanted)), name


@pytest.mark.gpu
def test_a_captured_step_replays_like_an_eager_one() -> None:
    def build() -> tuple[list[list[Tensor]], Stepper]:
        params = [moderate(n, n, FP32).cuda() for n in (5000, 77)]
        zeros = [[torch.zeros_like(p) for p in params] for _ in range(2)]
        lists = [params, *zeros, [p.half() for p in params]]
        return lists, Stepper(lists, LossScaling(init_scale=4.0), CORRECT)

    (eager, one), (captured, other) = build(), build()
    grads = [moderate(p.numel(), 7, FP16).cuda() for p in eager[0]]
    for _ in range(3):
        one.step(grads)
    other.step(grads)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        other.step(grads)
    for _ in range(2):
        other.sync_hyperparameters()
        graph.replay()
    for ours, theirs in zip(captured, eager, strict=True):
        for left, right in zip(ours, theirs, strict=True):
            assert bool(same(left, right).all())
