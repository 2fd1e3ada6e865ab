"""Every optimizer class of the fast side keeps step with the reference's, bit for bit."""

from __future__ import annotations

import inspect
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR

from tests.helpers.battery import Twins, advance, masters_of, observed
from tests.helpers.sides import CLASSES, COUNTING, PLAIN, SIDES, WRAPPERS

pytestmark = pytest.mark.usefixtures("replay")

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
Steps = list[tuple[tuple[int, ...], float | None]]
# Parameters without a gradient, and what one element of the others is.
FINITE: Steps = [((), None), ((0, 3), None), ((2,), None), ((), None)]
SKIPPED: Steps = [((), math.inf), *FINITE, ((1,), math.nan), ((), -math.inf), *FINITE[:2]]
LARGE = [[(3, 700), (0,), (5,), (2049,), (), (64, 33)]]
SCALER = {"init_scale": 64.0, "scale_window": 2, "delayed_shift": 1}
SCALED: dict[str, Any] = {"scaler": SCALER, "clip_grad": 0.7}
LEGACY: dict[str, Any] = {**SCALED, "inside": "FusedLamb", "fused_lamb_legacy": True}
SHARED = {"shared_step_counter": True}
TRUE_NORM = {"unscale_with_updated_scale": True, "report_scaled_norm": True}
Row = tuple[str, dict[str, Any]]

PLAIN_ROWS: dict[str, Row] = {
    "adam": ("FusedAdam", {"dtype": "mixed", "shapes": LARGE}),
    "adam l2": ("FusedAdam", {"dtype": "mixed", "shapes": LARGE, "adam_w_mode": False}),
    "adam in groups": ("FusedAdam", {"dtype": "mixed", "transposed": True}),
    "adam l2 in groups": ("FusedAdam", {"dtype": SINGLE, "adam_w_mode": False}),
    "adam flat": ("FusedAdam", {"shapes": [[(4100,)]], "hyper": {"eps": 1e-6}}),
    "adam shared counter": ("FusedAdam", {"dtype": "mixed", "compat": SHARED}),
    "adam half moments": (
        "FusedAdam",
        {"dtype": "mixed", "compat": {"moments_in_param_dtype": True}},
    ),
    "adam half moments, shared counter": (
        "FusedAdam",
        {"dtype": "mixed", "compat": {"moments_in_param_dtype": True, **SHARED}},
    ),
    "lamb": ("FusedLamb", {"dtype": "mixed", "shapes": LARGE}),
    "lamb eps inside": ("FusedLamb", {"dtype": "mixed", "eps_inside_sqrt": True}),
    "lamb clipped": ("FusedLamb", {"dtype": "mixed", "shapes": LARGE, "max_grad_norm": 0.5}),
    "lamb clipped, eps inside": (
        "FusedLamb",
        {"dtype": "mixed", "transposed": True, "max_grad_norm": 0.5, "eps_inside_sqrt": True},
    ),
    "apex lamb": ("FusedLAMB", {"dtype": "mixed", "shapes": LARGE}),
    "apex lamb l2, nvlamb": (
        "FusedLAMB",
        {
            **{"dtype": "mixed", "transposed": True, "adam_w_mode": False, "use_nvlamb": True},
            "hyper": {"grad_averaging": False, "weight_decay": 0.0, "max_grad_norm": 0.25},
        },
    ),
    "lamb clipped by a tensor": (
        "FusedLamb",
        {"dtype": "mixed", "max_grad_norm": torch.tensor(0.25, dtype=torch.float64)},
    ),
}
FP16_ROWS: dict[str, Row] = {
    f"flat {inside} {dtype}": ("FP16Optimizer", {**SCALED, "inside": inside, "dtype": dtype})
    for inside in COUNTING
    for dtype in (HALF, BRAIN, SINGLE)
}
FP16_ROWS |= {
    f"flat norm {norm}": ("FP16Optimizer", {**SCALED, "norm_type": norm})
    for norm in (1.0, math.inf, 3.0)
}
FP16_ROWS |= {
    "flat uncorrected": ("FP16Optimizer", {**SCALED, "hyper": {"bias_correction": False}}),
    "flat adamw of torch": ("FP16Optimizer", {**SCALED, "inside": "AdamW"}),
    "flat lamb clips": ("FP16Optimizer", {**LEGACY, "hyper": {"max_grad_norm": 0.05}}),
    "unfused adam": ("FP16UnfusedOptimizer", {**SCALED, "transposed": True}),
    "unfused lamb": ("FP16UnfusedOptimizer", {**SCALED, "inside": "FusedLamb"}),
    "flat apex lamb": ("FP16Optimizer", {**SCALED, "inside": "FusedLAMB"}),
    "unfused apex lamb": ("FP16UnfusedOptimizer", {**SCALED, "inside": "FusedLAMB"}),
    "unfused lamb bf16": (
        "FP16UnfusedOptimizer",
        {**SCALED, "inside": "FusedLamb", "dtype": BRAIN},
    ),
    "unfused lamb fp32": (
        "FP16UnfusedOptimizer",
        {**SCALED, "inside": "FusedLamb", "dtype": SINGLE, "transposed": True},
    ),
    "unfused legacy": ("FP16UnfusedOptimizer", {**LEGACY, "transposed": True}),
    "unfused legacy clips": ("FP16UnfusedOptimizer", {**LEGACY, "hyper": {"max_grad_norm": 0.05}}),
    "unfused lamb clips": (
        "FP16UnfusedOptimizer",
        {**SCALED, "inside": "FusedLamb", "hyper": {"max_grad_norm": 0.05}},
    ),
    "unfused scaled norm": ("FP16UnfusedOptimizer", {**SCALED, "compat": {**SHARED, **TRUE_NORM}}),
    "unfused shared counter": ("FP16UnfusedOptimizer", {**SCALED, "hyper": {"compat": SHARED}}),
}
FP16_ROWS["flat lamb clips"][1].pop("fused_lamb_legacy")
BF16_ROWS: dict[str, Row] = {
    f"bf16 of {dtype}": (
        "BF16Optimizer",
        {"dtype": dtype, "clip_grad": 0.5, "hyper": {"adam_w_mode": False}},
    )
    for dtype in (HALF, SINGLE)
}
ROWS = {**PLAIN_ROWS, **FP16_ROWS, **BF16_ROWS}


@pytest.mark.parametrize("row", ROWS)
def test_steps_equal_the_reference(row: str) -> None:
    """Gradients that are missing, infinite and NaN; a scale that shrinks and grows."""
    name, options = ROWS[row]
    twins = Twins(name, **options)
    scales = set()
    for seed, (missing, bad) in enumerate(FINITE if name in PLAIN else SKIPPED):
        twins.fill(seed, missing, bad)
        twins.do(advance)
        twins.check()
        scales.add(getattr(twins.fast, "loss_scale", None))
    assert len(scales) > 2 or row not in FP16_ROWS


@pytest.mark.parametrize("name", ["FP16Optimizer", "FP16UnfusedOptimizer"])
def test_a_scaled_backward_and_accumulation_equal_the_reference(name: str) -> None:
    """With a scale from outside, too; after an overflow nothing is added to what was left."""
    twins = Twins(name, **SCALED)
    for seed in range(4):
        for optimizer, _ in twins.both():
            optimizer.override_loss_scale(3.7 if seed == 1 else None)
        for micro in range(2):
            twins.backward(10 * seed + micro, bad=math.inf if (seed, micro) == (2, 1) else None)
        twins.step()
        if seed != 2:
            twins.check()
        twins.do(lambda optimizer: optimizer.zero_grad())


def test_backward_before_anybody_looked_does_not_add_to_what_overflowed() -> None:
    twins = Twins("FP16UnfusedOptimizer", inside="FusedLamb", **SCALED)
    for seed, bad in enumerate((None, math.inf, None)):
        twins.fill(seed, bad=bad)
        twins.step()
        twins.backward(seed)
        twins.step()
    twins.check()


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one cycle": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=8),
    "lambda": lambda o: LambdaLR(o, lambda epoch: 1.0 / (1 + epoch)),
    "cyclic": lambda o: CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=2, cycle_momentum=True),
}
DRIVEN = [(name, "one cycle") for name in CLASSES["fast"] if name in (*PLAIN, *WRAPPERS)]


@pytest.mark.parametrize(
    ("name", "schedule"), [*DRIVEN, ("FusedAdam", "lambda"), ("FusedAdam", "cyclic")]
)
def test_schedules_of_lr_and_betas_reach_the_kernels(name: str, schedule: str) -> None:
    twins = Twins(name, [[(300,), (40,)]])
    schedules = [SCHEDULES[schedule](optimizer) for optimizer, _ in twins.both()]
    for seed in range(5):
        twins.fill(seed)
        twins.do(advance)
        for one in schedules:
            one.step()
    twins.check()


@pytest.mark.parametrize("name", PLAIN)
def test_hyper_parameters_may_be_tensors_of_either_precision(name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        twins = Twins(name, [[(300,), (40,)]])
        for optimizer, _ in twins.both():
            optimizer.param_groups[0]["lr"] = torch.tensor(0.1, dtype=dtype)
        for seed in range(3):
            twins.fill(seed)
            twins.do(advance)
            twins.do(lambda optimizer: optimizer.param_groups[0]["lr"].mul_(0.5))
        twins.check()


@pytest.mark.parametrize("name", PLAIN)
def test_a_group_that_is_added_later_keeps_its_own_hyper_parameters(name: str) -> None:
    twins, more = Twins(name, [[(300,)]]), Twins(name, [[(10,), (20,)]], "mixed")
    for (optimizer, params), (_, added) in zip(twins.both(), more.both(), strict=True):
        optimizer.add_param_group({"params": added, "lr": 0.5, "betas": (0.1, 0.2)})
        params.extend(added)
    for seed in range(2):
        twins.fill(seed)
        twins.do(advance)
    twins.check()


ALONE = {"load_optimizer_states": False}
STATES: dict[str, tuple[Any, ...]] = {
    "adam": ("FusedAdam", {"dtype": "mixed"}),
    "adam as upstream": (
        "FusedAdam",
        {"dtype": "mixed", "compat": {"moments_in_param_dtype": True, **SHARED}},
    ),
    "lamb": ("FusedLamb", {"dtype": "mixed"}),
    "flat around lamb": ("FP16Optimizer", {**SCALED, "inside": "FusedLamb"}),
    "flat without states": ("FP16Optimizer", SCALED, ALONE),
    "unfused without states": ("FP16UnfusedOptimizer", {**SCALED, "inside": "FusedLamb"}, ALONE),
}


@pytest.mark.parametrize("row", STATES)
@pytest.mark.parametrize("saver", [0, 1], ids=SIDES)
def test_either_side_goes_on_from_a_file_of_either(saver: int, row: str) -> None:
    """The wrappers around their usual optimizer: tests/contract/test_checkpoints_resume.py."""
    name, options, *load = STATES[row]
    loading = load[0] if load else {}
    twins = Twins(name, **options)
    for seed, missing in enumerate([(), (1,), ()]):
        twins.fill(seed, missing)
        twins.do(advance)
    file = io.BytesIO()
    torch.save((twins.fast, twins.reference)[saver].state_dict(), file)
    resumed = Twins(name, **options)
    for (optimizer, params), old in zip(resumed.both(), twins.params, strict=True):
        for param, weight in zip(params, old, strict=True):
            param.data.copy_(weight)
        for group in optimizer.param_groups:
            group["lr"] = 9.0
        file.seek(0)
        optimizer.load_state_dict(torch.load(file, weights_only=True), **loading)
    resumed.check()
    for seed in range(3, 5):
        for each in (twins, resumed):
            each.fill(seed)
            each.do(advance)
    resumed.check()
    assert bool(loading) or observed(resumed.fast, resumed.params[0]) == observed(
        twins.fast, twins.params[0]
    )


def test_the_comparison_can_say_no() -> None:
    """To every tensor and counter that a step writes, and to the last bit of it."""
    for name in (*PLAIN, *WRAPPERS):
        twins = Twins(name, [[(5,)]])
        twins.fill(0)
        twins.do(advance)
        twins.check()
        (master,) = masters_of(twins.fast)
        held: list[Tensor] = [master, twins.params[0][0], *twins.fast.state[master].values()]
        for tensor in held:
            kept = tensor.detach().clone()
            words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
            tensor.data.view(words).add_(1)
            with pytest.raises(AssertionError):
                twins.check()
            tensor.data.copy_(kept)
        twins.check()


@pytest.mark.parametrize("name", CLASSES["fast"])
def test_both_sides_take_the_same_arguments_and_have_the_same_methods(name: str) -> None:
    ours, theirs = CLASSES["fast"][name], CLASSES["reference"][name]
    one, other = (inspect.signature(kind.__init__).parameters for kind in (ours, theirs))
    assert list(one) == list(other)
    for argument in set(one) - {"self", "params", "compat"}:
        assert one[argument].default == other[argument].default, argument
        assert one[argument].kind == other[argument].kind, argument
    public = {attribute for attribute in dir(theirs) if not attribute.startswith("_")}
    # A state that is on the device is entered by kernels, not made ahead of its time.
    assert public - {"after"} <= set(dir(ours))
