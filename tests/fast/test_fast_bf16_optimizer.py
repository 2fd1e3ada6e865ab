"""The fast BF16Optimizer keeps step with the reference's, bit for bit."""

import math
from functools import partial

import pytest
import torch

from tests.helpers.battery import Subject
from tests.helpers.battery import Twins as AnyTwins
from twinstep.parity.cases.fixed_inputs import moderate
from twinstep.parity.expected.ulp import same

pytestmark = pytest.mark.usefixtures("replay")

BRAIN, FP32 = torch.bfloat16, torch.float32
SUBJECT = Subject("fast", "BF16Optimizer")
Twins = partial(AnyTwins, "BF16Optimizer")


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


def test_hooks_of_immediate_updates_can_be_removed() -> None:
    twins = Twins(immediate_grad_update=True)
    twins.fast.destroy()
    twins.fast.backward(twins.params[0][0].float().sum())
    assert twins.fast.get_full_hp_grad("p0").abs().max().item() == 0.0
    assert twins.params[0][0].grad is not None


@pytest.mark.parametrize(
    ("inside", "norm", "accumulation"),
    [("SGD", 2.0, FP32), ("AdamW", 1.0, BRAIN), ("FusedLamb", math.inf, FP32)]
    + [("FusedAdam", 3.0, BRAIN), ("SGD", 0.5, FP32)],
)
def test_any_optimizer_inside_and_any_norm_equal_the_reference(
    inside: str, norm: float, accumulation: torch.dtype
) -> None:
    twins = Twins(inside=inside, norm_type=norm, clip_grad=0.3, grad_acc_dtype=accumulation)
    for number, bad in enumerate([None, 3e38, math.nan, None, -math.inf, 1e-40]):
        twins.backward(number, (1,) if number % 2 else (), bad)
        twins.step()
        twins.check()
        if number == 3:
            saved = twins.fast.state_dict()
            twins.reference.load_state_dict([saved], load_from_fp32_weights=True)
            twins.fast.load_state_dict([twins.reference.state_dict()], load_from_fp32_weights=True)
            twins.check()
    assert twins.fast.fp32_groups_flat_partition[0].grad is None


def test_hooks_of_the_step_inside_are_called() -> None:
    optimizer = (twins := Twins()).fast
    calls: list[object] = []
    optimizer.optimizer.register_step_post_hook(lambda *given: calls.append(given))
    twins.backward(0, ())
    twins.step()
    assert len(calls) == 1
    twins.check()


def test_a_rate_that_is_no_number_is_refused_before_anything_has_changed() -> None:
    twins = Twins(inside="SGD", clip_grad=0.3)
    twins.backward(0, ())
    for optimizer, _ in twins.both():
        optimizer.param_groups[0]["lr"] = "large"
        with pytest.raises(TypeError, match="lr='large', but should be a number"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1
    twins.check()
    twins.step()
    twins.check()
