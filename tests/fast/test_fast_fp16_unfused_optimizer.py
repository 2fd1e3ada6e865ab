"""FP16UnfusedOptimizer in step with the reference, and what its step costs and waits for."""

import inspect
import io
import math
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

import twinstep.fast.fp16_optimizer
import twinstep.fast.fp16_unfused_optimizer
import twinstep.fast.fused_adam
import twinstep.fast.fused_lamb
import twinstep.fast.scalers
import twinstep.reference.optimizers.fp16
import twinstep.reference.optimizers.fp16_unfused
import twinstep.reference.optimizers.fused_adam
import twinstep.reference.optimizers.fused_lamb
import twinstep.reference.optimizers.scalers
import twinstep.replay
from twinstep.contract.compat import Compat
from twinstep.parity.cases.fixed_inputs import moderate
from twinstep.parity.expected.ulp import same
from twinstep.parity.runner.host_sync import watched

pytestmark = pytest.mark.usefixtures("replay")

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
SIDES: dict[str, dict[str, Any]] = {
    "fast": {
        "wrapper": twinstep.fast.fp16_unfused_optimizer.FP16UnfusedOptimizer,
        "adam": twinstep.fast.fused_adam.FusedAdam,
        "lamb": twinstep.fast.fused_lamb.FusedLamb,
        "scaler": twinstep.fast.scalers.DynamicLossScale,
        "compat": Compat,
    },
    "reference": {
        "wrapper": twinstep.reference.optimizers.fp16_unfused.FP16UnfusedOptimizer,
        "adam": twinstep.reference.optimizers.fused_adam.FusedAdam,
        "lamb": twinstep.reference.optimizers.fused_lamb.FusedLamb,
        "scaler": twinstep.reference.optimizers.scalers.DynamicLossScale,
        "compat": Compat,
    },
}
SHAPES: tuple[tuple[int, ...], ...] = ((7, 10), (0,), (30,), (5,))


class Training:
    """One side: parameters in two groups, an optimizer inside, a wrapper."""

    def __init__(self, side: str, dtype: torch.dtype, inside: str = "lamb", **given: Any) -> None:
        kinds = SIDES[side]
        compat = kinds["compat"](**given.pop("compat", {}))
        limit, transposed = given.pop("max_grad_norm", None), given.pop("transposed", True)
        self.params = []
        for slot, shape in enumerate(SHAPES):
            values = moderate(torch.Size(shape).numel(), slot, dtype).reshape(shape)
            # The first lies in memory in another order than its indices.
            self.params.append(
                torch.nn.Parameter(values.t() if slot == 0 and transposed else values)
            )
        groups = [{"params": self.params[:3]}, {"params": self.params[3:], "lr": 0.3}]
        hyper = {"lr": 0.02, "betas": (0.87, 0.987), "weight_decay": 0.03}
        hyper |= {} if limit is None else {"max_grad_norm": limit}
        scaler = kinds["scaler"](init_scale=64.0, scale_window=2, delayed_shift=1)
        self.optimizer = kinds["wrapper"](
            kinds[inside](groups, **hyper),
            compat=compat,
            **{"loss_scale_config": scaler, "clip_grad": 0.7, "verbose": False, **given},
        )

    def fill(self, seed: int, bad: float | None = None) -> None:
        """Gradients of a scaled loss, one of which may hold a number that is not finite."""
        for slot, param in enumerate(self.params):
            grad = moderate(param.numel(), 100 * seed + slot, param.dtype)
            if bad is not None and slot == 2:
                grad[-1] = bad
            param.grad = grad.reshape(param.shape)

    def seen(self) -> list[Tensor]:
        """Everything that a step writes."""
        optimizer = self.optimizer
        masters = [master for group in optimizer.fp32_groups for master in group]
        scalars = [optimizer.overflow, optimizer.loss_scale, optimizer.get_global_norm()]
        states = [optimizer.state.get(master, {}) for master in masters]
        state = [torch.as_tensor(value) for one in states for value in one.values()]
        weights = [tensor.detach() for tensor in (*self.params, *masters)]
        return [*map(torch.tensor, scalars), *weights, *state]


def check(one: Training, other: Training) -> None:
    ours, theirs = one.seen(), other.seen()
    assert len(ours) == len(theirs)
    for left, right in zip(ours, theirs, strict=True):
        assert left.dtype == right.dtype
        assert bool(same(left, right).all()), (left, right)
    missing = [[param.grad is None for param in side.params] for side in (one, other)]
    assert missing[0] == missing[1]
    assert one.optimizer.loss_scaler.state_dict() == other.optimizer.loss_scaler.state_dict()


BADS = (None, None, None, math.inf, None, math.nan, None)
CHOICES: tuple[dict[str, Any], ...] = (
    {"inside": "adam"},
    {"inside": "lamb"},
    {"inside": "lamb", "fused_lamb_legacy": True},
    {"inside": "lamb", "fused_lamb_legacy": True, "max_grad_norm": 0.05},
    {"inside": "lamb", "max_grad_norm": 0.05},
    {"inside": "adam", "compat": {"shared_step_counter": True, "report_scaled_norm": True}},
)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: " ".join(map(str, choice.values())))
def test_steps_equal_the_reference(choice: dict[str, Any]) -> None:
    pair = [Training(side, HALF, **choice) for side in SIDES]
    scales = set()
    for seed, bad in enumerate(BADS):
        for one in pair:
            one.fill(seed, bad)
            one.optimizer.step()
        check(pair[0], pair[1])
        scales.add(pair[0].optimizer.loss_scale)
    assert len(scales) > 2


@pytest.mark.parametrize("dtype", [BRAIN, SINGLE])
def test_other_dtypes_equal_the_reference(dtype: torch.dtype) -> None:
    pair = [Training(side, dtype) for side in SIDES]
    for seed, bad in enumerate((None, math.nan, None)):
        for one in pair:
            one.fill(seed, bad)
            one.optimizer.step()
        check(pair[0], pair[1])


def test_backward_before_anybody_looked_does_not_add_to_what_overflowed() -> None:
    pair = [Training(side, HALF, transposed=False) for side in SIDES]
    for one in pair:
        for seed, bad in enumerate((None, math.inf, None)):
            one.fill(seed, bad)
            one.optimizer.step()
            one.optimizer.backward(sum(p.float().square().sum() for p in one.params))
            one.optimizer.step()
    check(pair[0], pair[1])


@pytest.mark.parametrize("source", SIDES)
@pytest.mark.parametrize("states", [True, False])
def test_checkpoints_are_interchangeable(source: str, states: bool) -> None:
    saved = Training(source, HALF)
    for seed, bad in enumerate((math.inf, None, None)):
        saved.fill(seed, bad)
        saved.optimizer.step()
    file = io.BytesIO()
    torch.save(saved.optimizer.state_dict(), file)
    pair = [Training(side, HALF) for side in SIDES]
    for one in pair:
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        one.optimizer.load_state_dict(loaded, load_optimizer_states=states)
        for seed in (7, 8):
            one.fill(seed)
            one.optimizer.step()
    check(pair[0], pair[1])


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    one = Training("fast", HALF)
    one.fill(1)
    one.optimizer.step()
    before, good = [t.clone() for t in one.seen()], one.optimizer.state_dict()
    for broken, sentence in (
        ({**good, "fp32_groups": good["fp32_groups"][:1]}, "fp32_groups has 1 groups"),
        ({**good, "fp32_groups": [[], []]}, r"fp32_groups\[0\] has 0 tensors"),
        ({**good, "fp32_groups": 3}, "fp32_groups is a int"),
    ):
        with pytest.raises(ValueError, match=sentence):
            one.optimizer.load_state_dict(broken)
    for now, then in zip(one.seen(), before, strict=True):
        assert bool(same(now, then).all())


@pytest.mark.parametrize(("inside", "count", "size"), [("adam", 3, 30), ("lamb", 5, 42)])
def test_launches_and_bytes_of_a_step_are_those_of_the_design(
    inside: str, count: int, size: int
) -> None:
    params = [torch.nn.Parameter(moderate(4096, slot, HALF)) for slot in range(2)]
    kinds = SIDES["fast"]
    optimizer = kinds["wrapper"](kinds[inside](params), clip_grad=0.5, static_loss_scale=8.0)
    for seed in range(2):
        for param in params:
            param.grad = moderate(4096, seed, HALF)
        block = optimizer.loss_scaler.on(torch.device("cpu")).block
        masters = [master for group in optimizer.fp32_groups for master in group]
        with ExitStack() as stack:
            reads = [stack.enter_context(watched(t)) for t in (block, *masters, *params)]
            log = stack.enter_context(twinstep.replay.launches())
            optimizer.step()
        assert not any(reads)
        assert len(log) == count
    # Behind the pointer table: parameters and what is as large; counters are 16 bytes in all.
    moved = sum(
        traffic.read + traffic.written
        for launch in log
        for name, traffic in launch.buffers.items()
        if name.startswith("table[") and "finalise" not in launch.kernel
    )
    assert moved == size * sum(param.numel() for param in params)


def test_a_step_that_takes_no_gradients_is_refused_for_the_legacy_path() -> None:
    sentences = []
    for side, kinds in SIDES.items():
        with pytest.raises(TypeError) as caught:
            Training(side, HALF, "adam", fused_lamb_legacy=True)
        sentences.append(str(caught.value))
        assert "FusedAdam.step takes no" in str(caught.value), kinds
    assert len(sentences) == 2


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            twinstep.fast.fp16_unfused_optimizer.FP16UnfusedOptimizer,
            twinstep.reference.optimizers.fp16_unfused.FP16UnfusedOptimizer,
        ),
        (
            twinstep.fast.fp16_optimizer.FP16Optimizer,
            twinstep.reference.optimizers.fp16.FP16Optimizer,
        ),
        (
            twinstep.fast.scalers.StaticLossScale,
            twinstep.reference.optimizers.scalers.StaticLossScale,
        ),
        (
            twinstep.fast.scalers.DynamicLossScale,
            twinstep.reference.optimizers.scalers.DynamicLossScale,
        ),
    ],
)
def test_both_sides_take_the_same_arguments_and_have_the_same_methods(
    ours: type, theirs: type
) -> None:
    one, other = (inspect.signature(kind).parameters for kind in (ours, theirs))
    assert list(one) == list(other)
    for name in set(one) - {"compat"}:
        assert (one[name].default, one[name].kind) == (other[name].default, other[name].kind)
    public = {name for name in dir(theirs) if not name.startswith("_")}
    # A state that is on the device is entered by kernels, not made ahead of its time.
    assert public - {"after"} <= set(dir(ours))
