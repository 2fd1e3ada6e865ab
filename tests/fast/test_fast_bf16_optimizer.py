"""The fast BF16Optimizer keeps step with the reference's, bit for bit."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import twinstep.fast.bf16_optimizer
import twinstep.fast.fused_adam
import twinstep.reference.optimizers.bf16
import twinstep.reference.optimizers.fused_adam
from twinstep.contract.compat import Compat
from twinstep.parity.cases.fixed_inputs import moderate
from twinstep.parity.expected.ulp import same

pytestmark = pytest.mark.usefixtures("replay")

BRAIN, FP32 = torch.bfloat16, torch.float32
SHAPES = [[(3, 70), (0,), (5,)], [(), (300,)]]
OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.03, "weight_decay": 0.1},
    {"lr": 0.004, "betas": (0.8, 0.95), "eps": 1e-5, "bias_correction": False},
]


class Twins:
    """The same model under both optimizers."""

    def __init__(self, shapes: Any = SHAPES, dtype: torch.dtype = BRAIN, **options: Any) -> None:
        inner = options.pop("inner", {})
        compat = options.pop("compat", {})
        self.params: list[list[torch.nn.Parameter]] = []
        both = []
        for side, adam, made in (
            (twinstep.fast.bf16_optimizer, twinstep.fast.fused_adam.FusedAdam, Compat),
            (
                twinstep.reference.optimizers.bf16,
                twinstep.reference.optimizers.fused_adam.FusedAdam,
                Compat,
            ),
        ):
            groups = [
                {"params": [self.param(shape, 7 * at + n, dtype) for n, shape in enumerate(row)]}
                | OPTIONS[at % 2]
                for at, row in enumerate(shapes)
            ]
            params = [param for group in groups for param in group["params"]]
            names = {param: f"p{at}" for at, param in enumerate(params)}
            inside = adam(groups, **inner)
            more = {"param_names": names, "compat": made(**compat), **options}
            both.append(side.BF16Optimizer(inside, **more))
            self.params.append(params)
        self.fast, self.reference = both

    @staticmethod
    def param(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.nn.Parameter:
        """A parameter with moderate values."""
        return torch.nn.Parameter(moderate(math.prod(shape), seed, dtype).reshape(shape))

    def both(self) -> Iterator[tuple[Any, list[torch.nn.Parameter]]]:
        """Each side with its parameters."""
        return zip((self.fast, self.reference), self.params, strict=True)

    def backward(self, seed: int, missing: tuple[int, ...] = (), bad: float | None = None) -> None:
        """One micro batch whose gradients are the same numbers on both sides."""
        for optimizer, params in self.both():
            loss = torch.zeros(())
            for slot, param in enumerate(params):
                if slot not in missing:
                    weight = moderate(param.numel(), 50 * seed + slot, param.dtype)
                    if bad is not None and param.numel():
                        weight[0] = bad
                    loss = loss + (param * weight.reshape(param.shape)).float().sum()
            if loss.requires_grad:
                optimizer.backward(loss)

    def step(self) -> None:
        """Step both."""
        for optimizer, _ in self.both():
            optimizer.step()

    def check(self) -> None:
        """Compare everything that can be seen."""
        one, other = self.fast, self.reference
        assert one.overflow == other.overflow
        norms = torch.tensor([one.get_global_norm(), other.get_global_norm()])
        assert bool(same(norms[0], norms[1]).all()), norms
        for ours, theirs in zip(one.groups, other.groups, strict=True):
            for name in ("flat", "master", "accumulator"):
                left, right = getattr(ours, name).detach(), getattr(theirs, name).detach()
                assert left.dtype == right.dtype
                assert bool(same(left, right).all()), name
            assert ours.has_gradient == theirs.has_gradient
            assert ours.padding == theirs.padding
            mine, wanted = one.state.get(ours.master, {}), other.state.get(theirs.master, {})
            assert mine.keys() == wanted.keys()
            for name in wanted:
                assert mine[name].dtype == wanted[name].dtype
                assert bool(same(mine[name], wanted[name]).all()), name
        for left, right in zip(*self.params, strict=True):
            assert bool(same(left.detach(), right.detach()).all())
            assert (left.grad is None) == (right.grad is None)
            if left.grad is not None and right.grad is not None:
                assert bool(same(left.grad, right.grad).all())


@pytest.mark.parametrize("immediate", [False, True])
@pytest.mark.parametrize(("accumulation", "clip"), [(FP32, 0.0), (FP32, 0.7), (BRAIN, 0.7)])
def test_ten_steps_equal_the_reference(
    accumulation: torch.dtype, clip: float, immediate: bool
) -> None:
    """Groups of their own, one or three micro batches, gradients that are missing, overflow."""
    twins = Twins(grad_acc_dtype=accumulation, clip_grad=clip, immediate_grad_update=immediate)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
        for optimizer, _ in twins.both()
    ]
    for number in range(10):
        missing: tuple[int, ...] = {0: (), 3: (0, 3), 4: (0, 1, 2, 3, 4)}.get(number, (1,))
        for micro in range(3 if number % 2 else 1):
            bad = math.inf if number == 6 else math.nan if number == 8 else None
            twins.backward(10 * number + micro, missing, bad)
        if number in (1, 5):
            twins.check()
        twins.step()
        for schedule in schedules:
            schedule.step()
        twins.check()
    assert int(twins.fast.state[twins.fast.groups[0].master]["step"]) == 8


@pytest.mark.parametrize("kind", [1.0, math.inf])
@pytest.mark.parametrize("accumulation", [FP32, BRAIN])
def test_other_norms_equal_the_reference(kind: float, accumulation: torch.dtype) -> None:
    twins = Twins(norm_type=kind, clip_grad=0.3, grad_acc_dtype=accumulation)
    for number, bad in enumerate([None, 3e38, math.nan, -math.inf, 0.0, 1e-40]):
        twins.backward(number, (1,) if number % 2 else (), bad)
        twins.step()
        twins.check()


def test_finite_gradients_with_an_infinite_norm_skip_the_step() -> None:
    twins = Twins(clip_grad=1.0)
    for optimizer, _ in twins.both():
        optimizer.groups[0].accumulator.fill_(3e38)
        optimizer.groups[0].has_gradient = [True] * 3
    twins.step()
    assert twins.fast.overflow
    assert twins.fast.get_global_norm() == math.inf
    twins.check()


@pytest.mark.parametrize("dtype", [torch.float16, FP32])
def test_models_of_other_dtypes_equal_the_reference(dtype: torch.dtype) -> None:
    twins = Twins([[(700,), (5,)]], dtype, clip_grad=0.5, inner={"adam_w_mode": False})
    for number in range(3):
        twins.backward(number)
        twins.step()
        twins.check()


def test_what_others_put_into_the_accumulators_is_stepped_with() -> None:
    """Reduction over ranks writes there; a parameter without gradient here may get one."""
    twins = Twins(clip_grad=0.1)
    twins.backward(1, missing=(0, 4))
    for optimizer, _ in twins.both():
        for flat in optimizer.get_grads_for_reduction()[0]:
            flat[:40] = moderate(40, 5, FP32)
    norms = [optimizer.get_grads_for_norm() for optimizer, _ in twins.both()]
    assert [grad.tolist() for grad in norms[0][0]] == [grad.tolist() for grad in norms[1][0]]
    clips = [optimizer.get_grads_for_norm(for_clipping=True) for optimizer, _ in twins.both()]
    assert [grad.tolist() for grad in clips[0]] == [grad.tolist() for grad in clips[1]]
    twins.step()
    twins.check()


def test_experts_are_told_apart_and_count_in_the_norm() -> None:
    twins = Twins(clip_grad=0.1)
    for optimizer, params in twins.both():
        for param in params[3:]:
            param.allreduce, param.group_name = False, "ep"  # type: ignore[attr-defined]
        assert optimizer.get_grads_for_norm() == ([], {})
    twins.backward(3)
    for named in [optimizer.get_grads_for_norm()[1] for optimizer, _ in twins.both()]:
        assert [grad.numel() for grad in named["ep"]] == [1, 300]
    twins.step()
    twins.check()


def test_a_replica_of_a_stage_does_not_count_but_is_clipped() -> None:
    twins = Twins(clip_grad=0.1, grad_acc_dtype=BRAIN)
    for _, params in twins.both():
        params[0].ds_pipe_replicated = True  # type: ignore[attr-defined]
    twins.backward(3)
    for optimizer, _ in twins.both():
        optimizer.groups[0].accumulator[0] = math.inf
    twins.step()
    assert not twins.fast.overflow
    twins.check()


def test_whole_weights_and_states_are_read_and_written_by_name() -> None:
    twins = Twins()
    with pytest.raises(ValueError, match="p0 has no state exp_avg, but has none before a first"):
        twins.fast.get_full_hp_param("p0", "exp_avg")
    twins.backward(1)
    twins.step()
    twins.backward(2)
    for name in ("p0", "p1", "p4"):
        for ask in (
            lambda side, name=name: side.get_full_hp_param(name),
            lambda side, name=name: side.get_full_hp_param(name, "exp_avg_sq"),
            lambda side, name=name: side.get_full_hp_grad(name),
        ):
            ours, theirs = ask(twins.fast), ask(twins.reference)
            assert ours.shape == theirs.shape
            assert bool(same(ours, theirs).all())
    for optimizer, _ in twins.both():
        optimizer.set_full_hp_param("p0", torch.full((3, 70), 0.5))
        optimizer.set_full_hp_param("p4", torch.full((300,), 2.0), "exp_avg")
        optimizer.update_lp_params()
    twins.check()
    with pytest.raises(ValueError, match="there is no parameter p9, but there are p0, p1"):
        twins.fast.get_full_hp_param("p9")
    with pytest.raises(ValueError, match=r"value has shape \(3,\), but should have \(300,\)"):
        twins.fast.set_full_hp_param("p4", torch.zeros(3))


def test_gradients_are_kept_and_cleared_like_the_references() -> None:
    twins = Twins()
    for optimizer, params in twins.both():
        loss = sum((param.float().sum() for param in params), torch.zeros(()))
        optimizer.backward(loss, update_hp_grads=False)
    twins.check()
    for optimizer, _ in twins.both():
        optimizer.update_hp_grads(clear_lp_grads=True)
    twins.check()
    twins.backward(5)
    for optimizer, _ in twins.both():
        optimizer.zero_grad(set_to_none=False)
    twins.check()


def test_masters_follow_model_weights_that_somebody_loaded() -> None:
    twins = Twins()
    for optimizer, params in twins.both():
        with torch.no_grad():
            params[0].fill_(0.25)
        optimizer.refresh_fp32_params()
        assert optimizer.memory_report()["accumulators"] == 4 * (216 + 302)
    twins.check()


def test_a_skipped_first_step_leaves_no_state() -> None:
    twins = Twins()
    twins.backward(0, bad=math.nan)
    twins.step()
    assert not twins.fast.optimizer.state
    twins.check()
    twins.backward(1)
    twins.step()
    assert len(twins.fast.optimizer.state) == 2
    twins.check()


def test_hooks_of_immediate_updates_can_be_removed() -> None:
    twins = Twins(immediate_grad_update=True)
    twins.fast.destroy()
    twins.fast.backward(twins.params[0][0].float().sum())
    assert twins.fast.get_full_hp_grad("p0").abs().max().item() == 0.0
    assert twins.params[0][0].grad is not None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"grad_acc_dtype": torch.float16}, "grad_acc_dtype=torch.float16, but should be float32"),
        ({"norm_type": 3.0}, "norm_type=3.0, but should be 1, 2 or infinity"),
        ({"param_names": {}}, r"param_names has no name for parameter 0 \[group 0"),
        ({"has_moe_layers": True}, "has_moe_layers=True, but no group is marked moe"),
    ],
)
def test_a_bad_option_is_refused_in_one_sentence(options: dict[str, Any], says: str) -> None:
    param = torch.nn.Parameter(torch.ones(3, dtype=BRAIN))
    given = {"param_names": {param: "p0"}, **options}
    with pytest.raises(ValueError, match=says):
        twinstep.fast.bf16_optimizer.BF16Optimizer(
            twinstep.fast.fused_adam.FusedAdam([param]), **given
        )


def test_what_is_not_supported_says_so() -> None:
    param = torch.nn.Parameter(torch.ones(3, dtype=BRAIN))
    with pytest.raises(
        TypeError, match=r"is a SGD, but should be a twinstep.fast.fused_adam.FusedAdam"
    ):
        twinstep.fast.bf16_optimizer.BF16Optimizer(
            torch.optim.SGD([param]), param_names={param: "p0"}
        )
    twins = Twins()
    with pytest.raises(RuntimeError, match="closure was given"):
        twins.fast.step(lambda: 1.0)
    with pytest.raises(RuntimeError, match="a group was added"):
        twins.fast.add_param_group({"params": [param]})
    other = torch.nn.Parameter(torch.ones(3))
    both = twinstep.fast.fused_adam.FusedAdam([param, other])
    with pytest.raises(ValueError, match="bfloat16 and float32, but should have one dtype"):
        twinstep.fast.bf16_optimizer.BF16Optimizer(both, param_names={param: "a", other: "b"})
