"""FusedLamb as a torch optimizer: what it steps, what it keeps, what it refuses."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor

from twinstep.parity.cases.fixed_inputs import bits, moderate
from twinstep.reference.arithmetic import float64
from twinstep.reference.lamb import lamb_step
from twinstep.reference.optimizers.fused_lamb import FusedLamb

OPTIONS = {"lr": 0.02, "betas": (0.87, 0.993), "eps": 3e-4, "weight_decay": 0.07}


def param(values: list[float] | Tensor, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.as_tensor(values, dtype=dtype))


def with_grads(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    params = [param(moderate(size, i, dtype), dtype) for i, size in enumerate(sizes)]
    for i, p in enumerate(params):
        p.grad = moderate(p.numel(), 50 + i, dtype)
    return params


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_two_steps_are_two_operations(dtype: torch.dtype, inside: bool) -> None:
    params = with_grads(7, 3, dtype=dtype)
    grads = [p.grad.clone() for p in params if p.grad is not None]
    wanted = [p.detach().clone() for p in params]
    m, v = ([torch.zeros(p.shape) for p in params] for _ in range(2))
    steps = [torch.tensor(0) for _ in params]
    optimizer = FusedLamb(params, eps_inside_sqrt=inside, **OPTIONS)  # type: ignore[arg-type]
    for _ in range(2):
        optimizer.step()
        wanted, m, v, _, steps = lamb_step(
            wanted, grads, m, v, [], steps,
            lr=float64(0.02), beta1=float64(0.87), beta2=float64(0.993), eps=float64(3e-4),
            weight_decay=float64(0.07), max_coeff=float64(10.0), min_coeff=float64(0.01),
            factor=torch.tensor(1.0), found_inf=torch.tensor(0.0),
            bias_correction=True, eps_inside_sqrt=inside,
        )  # fmt: skip
    assert [bits(p.detach()) for p in params] == [bits(p) for p in wanted]
    assert [bits(optimizer.state[p]["exp_avg"]) for p in params] == [bits(x) for x in m]
    assert [optimizer.state[p]["step"].item() for p in params] == [2, 2]


def test_coefficients_are_the_trust_ratios_of_the_last_step() -> None:
    p, q = param([3.0, 4.0]), param([1.0])
    p.grad = torch.tensor([1.0, 0.0])
    optimizer = FusedLamb([p, q], lr=0.1)
    optimizer.step()
    assert optimizer.get_lamb_coeffs() == pytest.approx([1.581139], abs=1e-6)
    p.grad = None
    optimizer.step()
    assert optimizer.get_lamb_coeffs() == []


def test_given_gradients_win_and_scale_divides_them() -> None:
    one, two = with_grads(5), with_grads(5)
    a, b = (FusedLamb(params, **OPTIONS) for params in (one, two))  # type: ignore[arg-type]
    given = [8.0 * one[0].grad] if one[0].grad is not None else []
    one[0].grad = torch.full((5,), torch.nan)
    copies = [torch.zeros(5, dtype=torch.float16)]
    a.step(grads=given, output_params=copies, scale=8.0)
    b.step()
    assert bits(one[0].detach()) == bits(two[0].detach())
    assert bits(copies[0]) == bits(two[0].detach().half())


@pytest.mark.parametrize("known", [False, True], ids=["computed", "given"])
def test_max_grad_norm_clips_each_gradient(known: bool) -> None:
    """Edge LB-1: without norms upstream raises TypeError; here they are computed."""
    one, two = param([3.0, 4.0]), param([3.0, 4.0])
    one.grad, two.grad = torch.tensor([6.0, 8.0]), torch.tensor([0.6, 0.8])
    FusedLamb([one], max_grad_norm=1.0).step(grad_norms=[[10.0]] if known else None)
    FusedLamb([two]).step()
    assert one.tolist() == pytest.approx(two.tolist(), rel=1e-6)


def test_an_empty_list_of_gradients_is_refused_in_one_sentence() -> None:
    """Edge LB-4: upstream looks at the first element of nothing."""
    (p,) = with_grads(2)
    with pytest.raises(ValueError, match=r"grads has \[0\] tensors per group, but should have"):
        FusedLamb([p]).step(grads=[])
    q = with_grads(2, 2)
    groups: list[dict[str, object]] = [{"params": [q[0]]}, {"params": [q[1]]}]
    optimizer = FusedLamb(groups)
    with pytest.raises(ValueError, match=r"should have \[1, 1\]"):
        optimizer.step(grads=[[q[0].grad], []])


def test_parameters_without_gradient_are_left_alone() -> None:
    p, q = with_grads(2, 3)
    q.grad, before = None, q.detach().clone()
    optimizer = FusedLamb([p, q])
    optimizer.step()
    assert bits(q.detach()) == bits(before)
    assert not optimizer.state[q]


def test_initializing_states_changes_no_value() -> None:
    p, q = with_grads(2, 3)
    optimizer, twin = FusedLamb([p]), FusedLamb([q])
    before = p.detach().clone()
    optimizer.initialize_states()
    assert bits(p.detach()) == bits(before)
    assert optimizer.state[p]["step"].item() == 0
    assert not twin.state[q]


def test_a_sparse_gradient_is_refused_and_nothing_is_written() -> None:
    (p,), q = with_grads(2), param([1.0, 2.0])
    q.grad = torch.tensor([1.0, 0.0]).to_sparse()
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match="should be dense"):
        FusedLamb([p, q]).step()
    assert bits(p.detach()) == bits(before)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"amsgrad": True}, "amsgrad=True, but should be False"),
        ({"lr": -1.0}, r"lr=-1.0, but should be at least 0 \[FusedLamb\]"),
        ({"min_coeff": -0.1}, "min_coeff=-0.1, but should be at least 0"),
        ({"max_coeff": 0.001}, "max_coeff=0.001, but should be at least min_coeff=0.01"),
    ],
)
def test_a_bad_option_is_refused_in_one_sentence(option: dict[str, float], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        FusedLamb([param([1.0])], **option)  # type: ignore[arg-type]


def test_a_saved_state_continues_bit_for_bit_and_is_a_safe_file() -> None:
    params = with_grads(5, 2, dtype=torch.float16)
    optimizer = FusedLamb(params, **OPTIONS)  # type: ignore[arg-type]
    optimizer.step()
    twins = [param(p.detach().clone(), p.dtype) for p in params]
    for p, twin in zip(params, twins, strict=True):
        twin.grad = p.grad
    other = FusedLamb(twins, **OPTIONS)  # type: ignore[arg-type]
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    optimizer.step()
    other.step()
    for p, twin in zip(params, twins, strict=True):
        assert bits(p.detach()) == bits(twin.detach())
        assert bits(optimizer.state[p]["exp_avg_sq"]) == bits(other.state[twin]["exp_avg_sq"])


def test_a_copy_of_the_optimizer_steps_alike() -> None:
    params = with_grads(4)
    optimizer = FusedLamb(params, eps_inside_sqrt=True)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    assert twin.eps_inside_sqrt
    assert twin.get_lamb_coeffs() == optimizer.get_lamb_coeffs()
    (twin_param,) = twin.param_groups[0]["params"]
    twin_param.grad = params[0].grad
    optimizer.step()
    twin.step()
    assert bits(twin_param.detach()) == bits(params[0].detach())
