"""Every optimizer class of both sides refuses the same in one sentence, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.helpers.battery import (
    EVERY,
    HYPER,
    PLAINS,
    WRAPPED,
    Subject,
    advance,
    fill,
    observed,
    parameters,
)
from tests.helpers.sides import CLASSES, SIDES

pytestmark = pytest.mark.usefixtures("replay")

Refusal = tuple[dict[str, Any], type[Exception], str]
LACKING = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 4.0}}
NUMBERS: list[Refusal] = [
    ({"lr": -0.1}, ValueError, "lr=-0.1, but should be at least 0"),
    ({"lr": float("nan")}, ValueError, "lr=nan, but should be finite"),
    ({"lr": "fast"}, TypeError, "lr='fast', but should be a number"),
    ({"lr": torch.ones(2)}, ValueError, r"lr has shape \(2,\), but should have one element"),
    ({"eps": -1e-8}, ValueError, "eps=-1e-08, but should be at least 0"),
    ({"eps": float("nan")}, ValueError, "eps=nan, but should be finite"),
    ({"betas": (1.0, 0.9)}, ValueError, r"betas\[0\]=1.0, but should be in \[0, 1\)"),
    ({"betas": (0.9, -0.1)}, ValueError, r"betas\[1\]=-0.1, but should be in \[0, 1\)"),
    ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\]=1.0, but should be in \[0, 1\)"),
    ({"betas": 0.9}, TypeError, "betas=0.9, but should be two numbers"),
    ({"weight_decay": float("inf")}, ValueError, "weight_decay=inf, but should be finite"),
    ({"bias_correction": 1}, TypeError, "bias_correction=1, but should be True or False"),
    ({"bias_correction": 1.0}, TypeError, "bias_correction=1.0, but should be True or False"),
    ({"amsgrad": True}, RuntimeError, "amsgrad=True, but should be False"),
]
REFUSED: dict[str, list[Refusal]] = {
    "FusedAdam": NUMBERS,
    "FusedLamb": [
        *NUMBERS,
        ({"min_coeff": -0.1}, ValueError, "min_coeff=-0.1, but should be at least 0"),
        ({"max_coeff": 0.001}, ValueError, "max_coeff=0.001, but should be at least min_coeff=0.0"),
    ],
    "FusedLAMB": [
        *NUMBERS,
        ({"max_grad_norm": float("nan")}, ValueError, "max_grad_norm=nan, but should be finite"),
        ({"grad_averaging": 1}, TypeError, "grad_averaging=1, but should be True or False"),
    ],
    "FP16Optimizer": [
        ({"norm_type": 0.0}, ValueError, "norm_type=0.0, but should be positive"),
        (LACKING, ValueError, "has init_scale, but lacks scale_window, min_scale"),
        (
            {"fused_adam_legacy": True},
            RuntimeError,
            "fused_adam_legacy=True, but should be False: no optimizer here takes gradients",
        ),
    ],
    "FP16UnfusedOptimizer": [
        ({"norm_type": 0.0}, ValueError, "norm_type=0.0, but should be positive"),
        (LACKING, ValueError, "has init_scale, but lacks scale_window, min_scale"),
        (
            {"fused_lamb_legacy": True},
            TypeError,
            "FusedAdam.step takes no grads, output_params, scale",
        ),
    ],
    "BF16Optimizer": [
        ({"norm_type": 0}, ValueError, "norm_type=0, but should be positive or infinite"),
        ({"grad_acc_dtype": None}, ValueError, "grad_acc_dtype=None, but should be float32 or bf"),
        ({"grad_acc_dtype": torch.float16}, ValueError, "grad_acc_dtype=torch.float16, but should"),
        ({"param_names": {}}, ValueError, r"param_names has no name for parameter 0 \[group 0"),
        ({"has_moe_layers": True}, ValueError, "has_moe_layers=True, but no group is marked moe"),
    ],
}
ROWS = [
    (Subject(side, name), *row) for name, rows in REFUSED.items() for row in rows for side in SIDES
]


@pytest.mark.parametrize(("subject", "options", "kind", "message"), ROWS, ids=str)
def test_a_bad_option_is_refused_in_one_sentence(
    subject: Subject, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        subject(subject.parameters(2), **options)
    assert "\n" not in str(caught.value)
    assert subject.name in str(caught.value) or "dynamic_loss_args" in options


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["FP16Optimizer", "FP16UnfusedOptimizer"])
@pytest.mark.parametrize(
    ("param", "message"),
    [
        (torch.zeros(2, dtype=torch.float64), "parameter is float64, but should be float16 or"),
        (torch.zeros(1).expand(3), "memory of its own for each element"),
    ],
    ids=["dtype", "overlap"],
)
def test_a_wrapper_looks_at_parameters_that_the_optimizer_inside_took(
    side: str, name: str, param: Tensor, message: str
) -> None:
    params = [Parameter(torch.ones(2)), Parameter(param)]
    with pytest.raises(ValueError, match=message) as caught:
        CLASSES[side][name](torch.optim.SGD(params, lr=0.1))
    assert "parameter 1" in str(caught.value)


@PLAINS
def test_negative_weight_decay_is_allowed(subject: Subject) -> None:
    params = subject.parameters(4)
    before = params[0].detach().clone()
    optimizer = subject(params, weight_decay=-0.5)
    assert optimizer.defaults["weight_decay"] == -0.5
    params[0].grad = torch.zeros(4)
    optimizer.step()
    assert bool((params[0].detach().abs() > before.abs()).all())


@PLAINS
@pytest.mark.parametrize(
    ("group", "message"),
    [
        (
            lambda: {"params": [Parameter(torch.zeros(2, dtype=torch.float64))]},
            "parameter is float64, but should be float16 or bfloat16 or float32",
        ),
        (
            lambda: {"params": [Parameter(torch.zeros(1).expand(3))]},
            "memory of its own for each element",
        ),
        (lambda: {"params": [Parameter(torch.zeros(2))], "lr": -1.0}, "lr=-1.0"),
        (lambda: {"params": (Parameter(torch.zeros(2)), "bias")}, "names|Tensors"),
    ],
    ids=["dtype", "overlap", "number", "what is no tensor"],
)
def test_a_bad_group_leaves_the_optimizer_and_the_dict_unchanged(
    subject: Subject, group: Callable[[], dict[str, Any]], message: str
) -> None:
    params = subject.parameters(2)
    optimizer = subject(params)
    before = observed(optimizer, params)
    given = group()
    kept = dict(given)
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer.add_param_group(given)
    assert given.keys() == kept.keys()
    assert all(given[name] is kept[name] for name in kept)
    assert len(optimizer.param_groups) == 1
    assert observed(optimizer, params) == before


@PLAINS
def test_a_parameter_that_is_there_leaves_the_dict_unchanged(subject: Subject) -> None:
    params = subject.parameters(2)
    optimizer, given = subject(params), {"params": params[0]}
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group(given)
    assert given.keys() == {"params"}
    assert given["params"] is params[0]


@WRAPPED
def test_a_closure_and_a_later_group_are_refused_with_the_reason(subject: Subject) -> None:
    """Edge FP-5: upstream drops the closure without a word."""
    params = subject.parameters(3)
    optimizer = subject(params, hyper=HYPER)
    fill(params, 1)
    before = observed(optimizer, params)
    what = f"closure was given, .* backward is this .*pl_optimizer=False.*{subject.name}.step"
    with pytest.raises(RuntimeError, match=what):
        optimizer.step(lambda: 1.0)
    with pytest.raises(RuntimeError, match=f"a group was added.* construction.*{subject.name}"):
        optimizer.add_param_group({"params": subject.parameters(2)})
    assert observed(optimizer, params) == before


@WRAPPED
def test_a_used_optimizer_is_refused(subject: Subject) -> None:
    home = CLASSES[subject.side]
    used = home["FusedAdam"](params := subject.parameters(2))
    used.initialize_states()
    options = {"param_names": {params[0]: "p"}} if subject.name == "BF16Optimizer" else {}
    with pytest.raises(ValueError, match="optimizer has state of 1 parameters, but should be fr"):
        home[subject.name](used, **options)


@EVERY
def test_a_sparse_gradient_is_refused_before_anything_is_written(subject: Subject) -> None:
    params: list[Parameter] = parameters((4, 4), torch.float32)
    optimizer = subject(params, hyper=HYPER)
    fill(params, 1)
    before = observed(optimizer, params)
    params[1].grad = torch.ones(4).to_sparse()
    with pytest.raises(RuntimeError, match=r"layout torch.sparse_coo, but should be dense"):
        advance(optimizer)
    fill(params, 1)
    assert observed(optimizer, params) == before


@pytest.mark.parametrize("side", SIDES)
def test_bf16_refuses_experts_that_are_mixed_and_dtypes_that_are_mixed(side: str) -> None:
    subject = Subject(side, "BF16Optimizer")
    group: dict[str, Any] = {"params": subject.parameters(2), "moe": True, "name": "a"}
    with pytest.raises(ValueError, match=r"not all its parameters are \[group 0"):
        subject([group], has_moe_layers=True)
    both = [*subject.parameters(2), Parameter(torch.ones(1))]
    with pytest.raises(ValueError, match="bfloat16 and float32, but should have one dtype"):
        subject(both)
    optimizer = subject([{"params": [param]} for param in both])
    assert [flat.dtype for flat in optimizer.bf16_groups_flat] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("side", SIDES)
def test_lamb_refuses_lists_of_another_length(side: str) -> None:
    """Edge LB-4: upstream looks at the first element of nothing."""
    subject = Subject(side, "FusedLamb")
    params = subject.parameters(2, 3)
    fill(params, 1)
    grads: list[Tensor | None] = [param.grad for param in params]
    one = subject(params)
    before = observed(one, params)
    for given in ([], grads[:1]):
        says = rf"grads has \[{len(given)}\] tensors per group, but should have \[2\]"
        with pytest.raises(ValueError, match=says):
            one.step(grads=given)
    assert observed(one, params) == before
    two = subject([{"params": [param]} for param in params])
    with pytest.raises(ValueError, match=r"should have \[1, 1\]"):
        two.step(grads=[grads[:1], []])


def short(state: dict[str, Any]) -> list[Tensor]:
    return [master[:-1] for master in state["fp32_groups_flat"]]


State = dict[str, Any]
UNFIT: list[tuple[str, Callable[[State], State], str]] = [
    ("FP16Optimizer", lambda s: {"fp32_groups_flat": short(s)}, r"flat\[0\] has 4 elements"),
    ("FP16Optimizer", lambda s: {"fp32_groups_flat": short(s)[:1]}, "flat has 1 tensors"),
    ("FP16Optimizer", lambda s: {"clip_grad": "much"}, "clip_grad='much'"),
    ("FP16Optimizer", lambda s: {"cur_scale": -1.0}, "loss scale is -1.0"),
    ("FP16Optimizer", lambda s: {"optimizer_state_dict": {}}, "should be the state dict of an opt"),
    ("FP16UnfusedOptimizer", lambda s: {"fp32_groups": s["fp32_groups"][:1]}, "has 1 groups"),
    ("FP16UnfusedOptimizer", lambda s: {"fp32_groups": [[], []]}, r"groups\[0\] has 0 tensors"),
    (
        "FP16UnfusedOptimizer",
        lambda s: {"fp32_groups": 3},
        "fp32_groups is a int, but should",
    ),
]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("name", "change", "message"), UNFIT)
def test_a_state_that_does_not_fit_is_refused_with_the_reason(
    side: str, name: str, change: Callable[[State], State], message: str
) -> None:
    """All that does not fit, nothing changed: tests/contract/test_checkpoints_refused.py."""
    subject = Subject(side, name)
    params = subject.parameters(5, 3)
    optimizer = subject([{"params": params[:1]}, {"params": params[1:]}], hyper=HYPER)
    fill(params, 1)
    advance(optimizer)
    state = optimizer.state_dict()
    before = observed(optimizer, params)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict({**state, **change(state)})
    lacking = {key: value for key, value in state.items() if key != "cur_iter"}
    with pytest.raises(ValueError, match="state has no cur_iter, but should"):
        optimizer.load_state_dict(lacking)
    assert observed(optimizer, params) == before
