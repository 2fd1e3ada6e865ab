"""FusedAdam steps: arithmetic, counters, hyper-parameters, odd parameters, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from twinstep.contract.compat import Compat, moment_dtype
from twinstep.parity.cases.fixed_inputs import bits, moderate
from twinstep.reference.adam import adam_step, adamw_step
from twinstep.reference.arithmetic import float64
from twinstep.reference.optimizers.fused_adam import FusedAdam

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
HYPER = {"lr": 0.0123, "beta1": 0.87, "beta2": 0.993, "eps": 3e-7, "weight_decay": 0.07}


def make(params: list[Parameter], **options: object) -> FusedAdam:
    known: dict[str, object] = {
        "lr": HYPER["lr"],
        "betas": (HYPER["beta1"], HYPER["beta2"]),
        "eps": HYPER["eps"],
        "weight_decay": HYPER["weight_decay"],
    }
    constructor: Callable[..., FusedAdam] = FusedAdam
    return constructor(params, **{**known, **options})


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[Parameter]:
    return [Parameter(moderate(n, 5 + n, dtype)) for n in sizes]


def set_grads(params: list[Parameter], seed: int) -> None:
    for index, p in enumerate(params):
        p.grad = moderate(p.numel(), seed + index, p.dtype).reshape(p.shape)


@pytest.mark.parametrize("adam_w_mode", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_three_steps_are_three_calls_of_the_operation(
    dtype: torch.dtype, adam_w_mode: bool
) -> None:
    params = parameters(5, 9, dtype=dtype)
    optimizer = make(params, adam_w_mode=adam_w_mode)
    p = [t.detach().clone() for t in params]
    m, v = ([torch.zeros(t.numel()) for t in params] for _ in range(2))
    steps = [torch.tensor(0), torch.tensor(0)]
    step: Callable[..., tuple[list[Tensor], ...]] = adamw_step if adam_w_mode else adam_step
    for seed in (10, 20, 30):
        set_grads(params, seed)
        grads = [t.grad for t in params]
        optimizer.step()
        p, m, v, _, steps = step(
            p,
            grads,
            m,
            v,
            [],
            steps,
            **{name: float64(value) for name, value in HYPER.items()},
            factor=torch.tensor(1.0),
            found_inf=torch.tensor(0.0),
            bias_correction=True,
        )
    for index, param in enumerate(params):
        state = optimizer.state[param]
        assert bits(param.detach()) == bits(p[index])
        assert bits(state["exp_avg"]) == bits(m[index])
        assert bits(state["exp_avg_sq"]) == bits(v[index])
        assert state["step"].item() == 3


def test_state_is_fp32_moments_and_an_integer_counter() -> None:
    for dtype in DTYPES:
        (p,) = params = parameters(4, dtype=dtype)
        set_grads(params, 1)
        optimizer = make(params)
        optimizer.step()
        kinds = {name: t.dtype for name, t in optimizer.state[p].items()}
        assert kinds == {
            "step": torch.int64,
            "exp_avg": torch.float32,
            "exp_avg_sq": torch.float32,
        }


def test_state_keeps_its_identity_over_steps() -> None:
    (p,) = params = parameters(4)
    optimizer, seen = make(params), set()
    for seed in (1, 2, 3):
        set_grads(params, seed)
        optimizer.step()
        seen.add(tuple(t.data_ptr() for t in (p, *optimizer.state[p].values())))
    assert len(seen) == 1


def test_counters_advance_only_with_a_gradient() -> None:
    params = parameters(2, 3, 4)
    optimizer = make(params)
    for seed, without in ((1, 2), (2, 2), (3, 0)):
        set_grads(params, seed)
        params[without].grad = None
        optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [2, 3, 1]


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    a, b = params = parameters(4, 5)
    optimizer = make(params)
    set_grads(params, 1)
    b.grad = None
    before = bits(b.detach())
    optimizer.step()
    assert bits(b.detach()) == before
    assert b not in optimizer.state
    assert a in optimizer.state


def test_group_options_override_and_no_counter_is_kept_in_the_group() -> None:
    a, b = Parameter(torch.ones(1)), Parameter(torch.ones(1))
    groups: list[dict[str, object]] = [{"params": [a]}, {"params": [b], "lr": 0.5}]
    optimizer = FusedAdam(groups, lr=0.25, eps=0.0)
    for p in (a, b):
        p.grad = torch.ones(1)
    optimizer.step()
    assert (a.item(), b.item()) == (0.75, 0.5)
    assert all("step" not in group for group in optimizer.param_groups)


def unit_steps(compat: Compat) -> tuple[list[float], list[int]]:
    """Three parameters at 1, gradient 1, lr 0.1; the last one has no gradient in the third step."""
    params = [Parameter(torch.ones(1)) for _ in range(3)]
    optimizer = FusedAdam(params, lr=0.1, compat=compat)
    for step in range(3):
        for index, p in enumerate(params):
            p.grad = None if (step, index) == (2, 2) else torch.ones(1)
        optimizer.step()
    counters = [int(optimizer.state[p]["step"]) for p in params]
    return [p.item() for p in params], counters


def test_every_parameter_counts_for_itself() -> None:
    values, counters = unit_steps(Compat())
    assert counters == [3, 3, 2]
    assert values == pytest.approx([0.7, 0.7, 0.8], abs=1e-6)


def test_compat_shares_the_counter_of_the_last_parameter() -> None:
    values, counters = unit_steps(Compat(shared_step_counter=True))
    assert counters == [0, 1, 2]
    assert values == pytest.approx([0.64346, 0.64346, 0.8], abs=5e-6)


def mixed_unit_step(compat: Compat) -> tuple[list[float], list[int]]:
    params: list[Parameter] = [Parameter(torch.ones(1, dtype=dtype)) for dtype in DTYPES]
    optimizer = FusedAdam(params, lr=0.1, compat=compat)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return [p.item() for p in params], [int(optimizer.state[p]["step"]) for p in params]


def test_dtypes_in_one_group_share_nothing() -> None:
    values, counters = mixed_unit_step(Compat())
    assert counters == [1, 1, 1]
    assert values == [torch.tensor(0.9).to(dtype).item() for dtype in DTYPES]


def test_compat_advances_the_shared_counter_once_for_each_dtype() -> None:
    values, counters = mixed_unit_step(Compat(shared_step_counter=True))
    assert counters == [0, 0, 3]
    assert values == pytest.approx([0.89990, 0.92578, 0.93612], abs=5e-6)


def tiny_gradient_steps(compat: Compat) -> tuple[float, float]:
    """An fp16 weight at 1 after a gradient of 2^-9, and then after a gradient of 0."""
    p = Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = FusedAdam([p], lr=2.0**-10, compat=compat)
    seen = []
    for grad in (2.0**-9, 0.0):
        p.grad = torch.full((1,), grad, dtype=torch.float16)
        optimizer.step()
        seen.append(p.item())
    assert optimizer.state[p]["exp_avg_sq"].dtype == moment_dtype(compat, torch.float16)
    return seen[0], seen[1]


def test_a_tiny_fp16_gradient_never_moves_a_weight_by_more_than_the_learning_rate() -> None:
    first, second = tiny_gradient_steps(Compat())
    assert first == 1 - 2.0**-10
    assert 0 < first - second <= 2.0**-10


def test_compat_stores_moments_in_the_parameter_dtype_and_explodes() -> None:
    """The stored second moment, 0.001 * 2^-18, is below half of the smallest fp16 number: 0.

    The step after it divides the first moment by eps alone.
    """
    first, second = tiny_gradient_steps(Compat(moments_in_param_dtype=True))
    assert first == 1 - 2.0**-10
    assert first - second > 10.0


def test_empty_tensors_anywhere_do_not_stop_their_neighbours() -> None:
    for sizes in ((0, 4), (4, 0), (4, 0, 4), (0,)):
        params = parameters(*sizes)
        optimizer = make(params)
        set_grads(params, 3)
        before = [bits(p.detach()) for p in params]
        optimizer.step()
        moved = [bits(p.detach()) != old for p, old in zip(params, before, strict=True)]
        assert moved == [size > 0 for size in sizes]


def test_non_contiguous_parameters_are_stepped_like_contiguous_ones() -> None:
    base = moderate(12, 1, torch.float32)
    strided, plain = Parameter(base.clone().reshape(3, 4).t()), Parameter(base.reshape(3, 4).t())
    plain = Parameter(plain.detach().contiguous())
    for p in (strided, plain):
        p.grad = moderate(12, 2, torch.float32).reshape(4, 3)
        make([p]).step()
    assert not strided.is_contiguous()
    assert bits(strided.detach()) == bits(plain.detach())


def test_hyper_parameters_may_be_tensors() -> None:
    a, b = parameters(6), parameters(6)
    tensors = {name: float64(value) for name, value in HYPER.items()}
    optimizer = FusedAdam(
        b,
        lr=tensors["lr"],
        betas=(tensors["beta1"], tensors["beta2"]),
        eps=tensors["eps"],
        weight_decay=tensors["weight_decay"],
    )
    for params, opt in ((a, make(a)), (b, optimizer)):
        set_grads(params, 3)
        opt.step()
    assert bits(a[0].detach()) == bits(b[0].detach())
    tensors["lr"].zero_()
    before = bits(b[0].detach())
    optimizer.step()
    assert bits(b[0].detach()) == before


def test_l2_mode_is_honoured_on_every_device() -> None:
    for adam_w_mode, wanted in ((True, 0.85), (False, 0.90)):
        p = Parameter(torch.ones(1))
        p.grad = torch.full((1,), 0.25)
        FusedAdam([p], lr=0.1, weight_decay=0.5, adam_w_mode=adam_w_mode).step()
        assert p.item() == pytest.approx(wanted, abs=1e-6)


def test_closure_runs_with_gradients_enabled() -> None:
    (p,) = params = parameters(3)
    optimizer = make(params)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss.item()

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss > 0
    assert optimizer.state[p]["step"].item() == 1
    assert optimizer.step() is None


@pytest.mark.parametrize("set_grad_none", [True, False])
def test_zero_grad_does_what_it_is_told(set_grad_none: bool) -> None:
    (p,) = params = parameters(3)
    optimizer = make(params, set_grad_none=set_grad_none)
    for told, drops in ((None, set_grad_none), (True, True), (False, False)):
        set_grads(params, 1)
        optimizer.zero_grad(set_to_none=told)
        assert (p.grad is None) == drops
        assert drops or (p.grad is not None and not p.grad.any())


def test_sparse_gradients_are_refused_before_anything_is_written() -> None:
    a, b = params = parameters(4, 4)
    set_grads(params, 1)
    b.grad = torch.ones(4).to_sparse()
    before = bits(a.detach())
    with pytest.raises(RuntimeError, match=r"layout torch.sparse_coo, but should be dense"):
        make(params).step()
    assert bits(a.detach()) == before


REFUSED: list[tuple[dict[str, object], type[Exception], str]] = [
    ({"lr": -0.1}, ValueError, "lr=-0.1, but should be at least 0"),
    ({"lr": float("nan")}, ValueError, "lr=nan, but should be finite"),
    ({"lr": "fast"}, TypeError, "lr='fast', but should be a number"),
    ({"lr": torch.ones(2)}, ValueError, r"lr has shape \(2,\), but should have one element"),
    ({"eps": -1e-8}, ValueError, "eps=-1e-08, but should be at least 0"),
    ({"betas": (1.0, 0.9)}, ValueError, r"betas\[0\]=1.0, but should be in \[0, 1\)"),
    ({"betas": (0.9, -0.1)}, ValueError, r"betas\[1\]=-0.1, but should be in \[0, 1\)"),
    ({"betas": 0.9}, TypeError, "betas=0.9, but should be two numbers"),
    ({"weight_decay": float("inf")}, ValueError, "weight_decay=inf, but should be finite"),
    ({"bias_correction": 1}, TypeError, "bias_correction=1, but should be True or False"),
    ({"amsgrad": True}, RuntimeError, "amsgrad=True, but should be False"),
]


@pytest.mark.parametrize(("options", "kind", "message"), REFUSED, ids=str)
def test_a_bad_option_is_refused_in_one_sentence(
    options: dict[str, object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        make(parameters(2), **options)


def test_negative_weight_decay_is_allowed() -> None:
    assert make(parameters(2), weight_decay=-0.5).defaults["weight_decay"] == -0.5


def test_a_bad_group_leaves_the_optimizer_unchanged() -> None:
    optimizer = make(parameters(2))
    double = Parameter(torch.zeros(2, dtype=torch.float64))
    shared = Parameter(torch.zeros(1).expand(3))
    with pytest.raises(ValueError, match=r"float64, but should be float16 or bfloat16 or"):
        optimizer.add_param_group({"params": [double]})
    with pytest.raises(ValueError, match="memory of its own for each element"):
        optimizer.add_param_group({"params": [shared]})
    with pytest.raises(ValueError, match="lr=-1.0"):
        optimizer.add_param_group({"params": parameters(2), "lr": -1.0})
    assert len(optimizer.param_groups) == 1
