"""BF16Optimizer on one rank: accumulation, the step, norms, and what upstream does differently."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from twinstep.contract.fragments import FragmentAddress
from twinstep.parity.cases.fixed_inputs import bits, moderate
from twinstep.reference.adam import adamw_step
from twinstep.reference.arithmetic import float64
from twinstep.reference.optimizers.bf16 import BF16Optimizer
from twinstep.reference.optimizers.fused_adam import FusedAdam
from twinstep.reference.parameters import Lists

BRAIN = torch.bfloat16


def param(values: list[float] | list[list[float]] | Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.as_tensor(values, dtype=BRAIN))


def around(inside: torch.optim.Optimizer, **options: object) -> BF16Optimizer:
    """Parameters are called p0, p1, ..."""
    params = [p for group in inside.param_groups for p in group["params"]]
    names = {p: f"p{place}" for place, p in enumerate(params)}
    make: Callable[..., BF16Optimizer] = BF16Optimizer
    return make(inside, **{"param_names": names, **options})


def sgd(*params: torch.nn.Parameter, **options: object) -> BF16Optimizer:
    return around(torch.optim.SGD(params, lr=1.0), **options)


def total(*terms: Tensor) -> Tensor:
    return sum((term.float().sum() for term in terms), torch.zeros(()))


@pytest.mark.parametrize("accumulation", [torch.float32, BRAIN])
def test_a_step_is_the_operation_on_the_accumulated_gradient(accumulation: torch.dtype) -> None:
    params = [param(moderate(n, n, BRAIN)) for n in (5, 0, 4)]
    optimizer = around(
        FusedAdam(params, lr=0.02, weight_decay=0.1), clip_grad=0.5, grad_acc_dtype=accumulation
    )
    p, m, v = optimizer.fp32_groups_flat_partition[0].detach().clone(), *torch.zeros(2, 10)
    steps, step = [torch.tensor(0)], adamw_call
    for number in range(3):
        summed = torch.zeros(10, dtype=accumulation)
        for micro in range(2):
            grad = moderate(9, 10 * number + micro, BRAIN)
            for place, piece in zip(params, grad.split([5, 0, 4]), strict=True):
                place.grad = piece.clone()
            optimizer.update_hp_grads()
            summed[:9] = (summed[:9].float() + grad.float()).to(accumulation)
        optimizer.step()
        norm = math.sqrt(math.fsum(x * x for x in summed.double().tolist()))
        norm = torch.tensor(norm).float().item()
        factor = torch.tensor(min(0.5 / (norm + 1e-6), 1.0), dtype=torch.float64).float()
        clipped = (summed.float() * factor).to(accumulation)
        (p,), (m,), (v,), (copy,), steps = step(p, clipped.float(), m, v, steps)
        assert optimizer.get_global_norm() == norm
        assert bits(optimizer.fp32_groups_flat_partition[0].detach()) == bits(p)
        assert bits(optimizer.bf16_groups_flat[0]) == bits(copy)


def adamw_call(p: Tensor, g: Tensor, m: Tensor, v: Tensor, steps: list[Tensor]) -> Lists:
    return adamw_step(
        [p], [g], [m], [v], [torch.zeros(10, dtype=BRAIN)], steps,
        lr=float64(0.02), beta1=float64(0.9), beta2=float64(0.999), eps=float64(1e-8),
        weight_decay=float64(0.1), factor=torch.tensor(1.0), found_inf=torch.zeros(()),
        bias_correction=True,
    )  # fmt: skip


@pytest.mark.parametrize("immediate", [False, True])
def test_backward_accumulates_until_the_step(immediate: bool) -> None:
    """Edges BF-9 and EN-2; the same with immediate updates."""
    weights = param([1.0, 2.0])
    optimizer = sgd(weights, immediate_grad_update=immediate)
    optimizer.backward(total(weights))
    optimizer.backward(total(2 * weights))
    assert optimizer.get_full_hp_grad("p0").tolist() == [3.0, 3.0]
    optimizer.step()
    assert weights.tolist() == [-2.0, -1.0]
    assert optimizer.get_full_hp_grad("p0").tolist() == [0.0, 0.0]


def test_immediate_updates_count_raw_backward_passes_once() -> None:
    """Edge BF-12: upstream has 1 + 3 where 1 + 2 is meant."""
    weights = param([1.0])
    optimizer = sgd(weights, immediate_grad_update=True)
    for factor in (1, 2):
        total(factor * weights).backward()
    assert optimizer.get_full_hp_grad("p0").tolist() == [3.0]
    assert weights.grad is None
    optimizer.destroy()
    total(weights).backward()
    assert optimizer.get_full_hp_grad("p0").tolist() == [3.0]


def test_bf16_accumulation_loses_what_fp32_keeps() -> None:
    """Edge BF-2 too: with bf16 accumulators weights move at all."""
    found = {}
    for dtype in (BRAIN, torch.float32):
        weights = param([0.0])
        optimizer = sgd(weights, grad_acc_dtype=dtype)
        optimizer.backward(total(256 * weights))
        for _ in range(4):
            optimizer.backward(total(weights))
        optimizer.step()
        found[dtype] = optimizer.fp32_groups_flat_partition[0][0].item()
    assert found == {BRAIN: -256.0, torch.float32: -260.0}


def test_gradients_can_be_kept_or_cleared() -> None:
    """Edge BF-3."""
    weights = param([1.0])
    optimizer = sgd(weights)
    optimizer.backward(total(weights), update_hp_grads=False)
    assert optimizer.get_full_hp_grad("p0").tolist() == [0.0]
    assert weights.grad is not None
    optimizer.update_hp_grads(clear_lp_grads=True)
    assert optimizer.get_full_hp_grad("p0").tolist() == [1.0]
    assert weights.grad is None
    optimizer.zero_grad()
    assert optimizer.get_full_hp_grad("p0").tolist() == [0.0]
    weights.grad = torch.ones(1, dtype=BRAIN)
    held = weights.grad
    optimizer.clear_lp_grads()
    assert weights.grad is held
    assert held.item() == 0.0
    weights.grad = torch.ones(2, dtype=BRAIN)[:1]
    optimizer.clear_lp_grads()
    assert weights.grad.item() == 0.0


def test_zero_gradients_and_none_at_all_are_a_step() -> None:
    """Edge BF-1: earlier versions aborted."""
    weights = param([1.0])
    optimizer = around(torch.optim.SGD([weights], lr=1.0, weight_decay=0.5))
    optimizer.backward(total(0 * weights))
    optimizer.step()
    assert (optimizer.get_global_norm(), weights.item()) == (0.0, 0.5)
    optimizer.step()
    assert (optimizer.get_global_norm(), weights.item()) == (0.0, 0.25)


def test_a_parameter_without_gradient_has_a_zero_gradient() -> None:
    """Edge BF-11."""
    used, unused = param([1.0]), param([1.0])
    optimizer = around(torch.optim.SGD([used, unused], lr=1.0, weight_decay=0.5))
    optimizer.backward(total(used))
    assert optimizer.get_grads_for_norm() == ([torch.ones(1)], {})
    assert optimizer.get_grads_for_norm(for_clipping=True) == [torch.ones(1)]
    optimizer.step()
    assert (used.item(), unused.item()) == (-0.5, 0.5)
    assert optimizer.get_grads_for_norm(for_clipping=True) == []


def test_a_flat_buffer_is_always_new_memory() -> None:
    """Edge BF-13: an aligned single tensor too; and the padding is zero."""
    weights = param([1.0, 2.0])
    where = weights.data_ptr()
    optimizer = sgd(weights)
    assert weights.data_ptr() == optimizer.bf16_groups_flat[0].data_ptr() != where
    assert sgd(param([1.0, 2.0, 3.0])).bf16_groups_flat[0].tolist() == [1.0, 2.0, 3.0, 0.0]


def test_empty_and_frozen_parameters_are_fine() -> None:
    """Edge TF-9."""
    first, empty, frozen, last = param([1.0]), param([]), param([5.0]), param([2.0, 3.0])
    frozen.requires_grad = False
    optimizer = sgd(first, empty, frozen, last)
    assert optimizer.param_slice_mappings == [
        {"p0": FragmentAddress(numel=1, start=0), "p3": FragmentAddress(numel=2, start=1)}
    ]
    optimizer.backward(total(first, empty, last))
    optimizer.step()
    assert [p.tolist() for p in (first, empty, frozen, last)] == [[0.0], [], [5.0], [1.0, 2.0]]
    assert optimizer.get_full_hp_param("p1").tolist() == []


@pytest.mark.parametrize(
    ("norm_type", "norm"), [(2.0, 5.0), (1.0, 7.0), (math.inf, 4.0), (3.0, 91.0 ** (1 / 3))]
)
def test_clipping_uses_the_norm_it_is_told(norm_type: float, norm: float) -> None:
    weights = param([0.0, 0.0])
    optimizer = sgd(weights, clip_grad=0.5, norm_type=norm_type)
    optimizer.backward(total(weights * torch.tensor([3.0, -4.0])))
    optimizer.step()
    assert optimizer.get_global_norm() == pytest.approx(norm, rel=1e-6)
    master = optimizer.fp32_groups_flat_partition[0].tolist()
    assert master == pytest.approx([-1.5 / norm, 2.0 / norm], rel=1e-5)


def test_experts_have_accumulators_of_their_own() -> None:
    shared, special = param([1.0]), param([1.0])
    special.allreduce = False  # type: ignore[attr-defined]
    special.group_name = "ep_size_1"  # type: ignore[attr-defined]
    inside = torch.optim.SGD([shared], lr=1.0)
    inside.add_param_group({"params": [special], "moe": True, "name": "ep_size_1"})
    optimizer = around(inside, has_moe_layers=True)
    optimizer.backward(total(3 * shared, 4 * special))
    flats, experts = optimizer.get_grads_for_reduction()
    assert [flat.tolist() for flat in flats] == [[3.0, 0.0]]
    assert [flat.tolist() for flat in experts["ep_size_1"]] == [[4.0, 0.0]]
    assert optimizer.get_grads_for_norm() == (
        [torch.tensor([3.0])],
        {"ep_size_1": [torch.tensor([4.0])]},
    )
    optimizer.step()
    assert optimizer.get_global_norm() == 5.0


def test_whole_weights_and_states_are_read_and_written_by_name() -> None:
    params = [param([[1.0, 2.0], [3.0, 4.0]]), param([5.0])]
    optimizer = around(FusedAdam(params, lr=0.5))
    with pytest.raises(ValueError, match="p1 has no state exp_avg, but has none before a first"):
        optimizer.get_full_hp_param("p1", "exp_avg")
    optimizer.backward(total(*params))
    optimizer.step()
    assert optimizer.get_full_hp_param("p1", "exp_avg").tolist() == pytest.approx([0.1])
    optimizer.set_full_hp_param("p0", torch.full((2, 2), 7.0))
    assert optimizer.get_full_hp_param("p0").tolist() == [[7.0, 7.0], [7.0, 7.0]]
    assert params[0].tolist() != [[7.0, 7.0], [7.0, 7.0]]
    optimizer.update_lp_params()
    assert params[0].tolist() == [[7.0, 7.0], [7.0, 7.0]]
    with pytest.raises(ValueError, match="there is no parameter p9, but there are p0, p1"):
        optimizer.get_full_hp_param("p9")
    with pytest.raises(ValueError, match=r"value has shape \(3,\), but should have \(1,\)"):
        optimizer.set_full_hp_param("p1", torch.zeros(3))


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """Edge BF-15; who wants to know about memory asks."""
    weights = param([1.0, 2.0, 3.0])
    optimizer = around(FusedAdam([weights]))
    optimizer.backward(total(weights))
    optimizer.step()
    optimizer.load_state_dict([optimizer.state_dict()])
    assert capfd.readouterr() == ("", "")
    assert optimizer.memory_report() == {
        "model_weights": 8, "master_weights": 16, "gradients": 6, "accumulators": 16,
        "optimizer_state": 40,
    }  # fmt: skip
