"""Derived bounds: honest arithmetic passes, a wrong formula does not, and the zones are narrow."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from twinstep.parity.cases.case import Case, Recipe
from twinstep.parity.cases.generate import generate
from twinstep.parity.expected.accepted import Accepted
from twinstep.parity.expected.outputs import accepted_outputs
from twinstep.parity.operations.operation import Bound
from twinstep.parity.operations.table import operation_named, operations

Change = Callable[[dict[str, float]], None]
CONTROLS = {"lr": 0.25, "beta1": 0.9991, "beta2": 0.9987, "eps": 1.3e-3, "weight_decay": 0.31}


def adamw_case(dtype: str = "fp32", regime: str = "mixture", seed: int = 1) -> Case:
    recipe = Recipe(
        layout="list",
        sizes=(700, 33),
        regime=regime,
        seed=seed,
        controls={**CONTROLS, "factor": 0.37},
        options={"bias_correction": True},
    )
    return generate(operation_named("adamw_step", "test"), dtype, recipe)


def step(case: Case, i: int, **wrong: float) -> dict[str, Tensor]:
    """torch.optim.AdamW's arithmetic, with one fault if asked for."""
    c = {name: float(value) for name, value in case.controls.items()}
    p, g = case.lists["params"][i].float(), case.lists["grads"][i].float() * c["factor"]
    m, v = case.lists["exp_avgs"][i].clone(), case.lists["exp_avg_sqs"][i].clone()
    t = int(case.lists["steps"][i].item()) + 1
    one_minus_b2 = wrong.get("c2", 1 - c["beta2"])
    m.lerp_(g, 1 - c["beta1"])
    v.mul_(c["beta2"]).addcmul_(g, g, value=one_minus_b2)
    if "half" in wrong:
        m = m.half().float()
    k1, k2 = 1 - c["beta1"] ** t, 1 - c["beta2"] ** t
    denominator = (v + c["eps"]).sqrt() if "inside" in wrong else v.sqrt() / k2**0.5 + c["eps"]
    w = p * (1 - wrong.get("decay", c["lr"]) * c["weight_decay"])
    w = w.addcdiv(m, denominator, value=-c["lr"] / k1)
    return {"params": w.to(case.lists["params"][i].dtype), "exp_avgs": m, "exp_avg_sqs": v}


def rejected(case: Case, **wrong: float) -> Iterator[str]:
    outputs = accepted_outputs(case, "bounded")
    for i in range(len(case.lists["params"])):
        for name, got in step(case, i, **wrong).items():
            if not bool(outputs[name][i].accepts(got).all()):
                yield name


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16-pure", "mixed"])
@pytest.mark.parametrize("regime", ["mixture", "ordinary", "cancelling", "tiny_root", "subnormal"])
def test_torch_arithmetic_stays_within_the_bound(dtype: str, regime: str) -> None:
    assert list(rejected(adamw_case(dtype, regime))) == []


@pytest.mark.parametrize(
    ("fault", "output"),
    [
        ({"c2": float(torch.tensor(1.0) - torch.tensor(0.9987))}, "exp_avg_sqs"),
        ({"inside": 1.0}, "params"),
        ({"decay": 1.0}, "params"),
        ({"half": 1.0}, "exp_avgs"),
    ],
    ids=["1 - beta in fp32", "eps inside the root", "decay without lr", "moment in fp16"],
)
def test_bound_rejects(fault: dict[str, float], output: str) -> None:
    assert output in set(rejected(adamw_case(), **fault))


def test_reference_itself_is_accepted_everywhere() -> None:
    propagated = [row for row in operations() if row.bound is Bound.PROPAGATED and row.lists]
    assert {"lamb_step", "mixed_step", "sgd_step", "unscale"} <= {row.name for row in propagated}
    for operation in propagated:
        options = {option.name: option.choices[0] for option in operation.options}
        for regime in ("mixture", "extreme", "bits", "planted"):
            recipe = Recipe(layout="list", sizes=(65, 0, 3), regime=regime, seed=5, options=options)
            for dtype in operation.combinations:
                for outputs in accepted_outputs(
                    generate(operation, dtype, recipe), "bounded"
                ).values():
                    assert all(bool(accepted.accepts(accepted.value).all()) for accepted in outputs)


def test_bound_is_a_few_ulp_on_ordinary_values() -> None:
    (accepted, _) = accepted_outputs(adamw_case(regime="ordinary"), "bounded")["exp_avg_sqs"]
    assert accepted.bound is not None
    relative = (accepted.bound / accepted.value.double().abs()).max().item()
    assert 2.0**-24 < relative < 2.0**-20


def test_only_overflow_makes_a_zone() -> None:
    (accepted, _) = accepted_outputs(adamw_case(regime="ordinary"), "bounded")["params"]
    assert accepted.zone is not None
    assert not bool(accepted.zone.any())


def test_a_rounding_to_few_bits_is_accepted_on_both_sides_of_a_tie_only() -> None:
    half = torch.tensor([1.0 + 2.0**-8], dtype=torch.float64)
    low, high = half - 2.0**-20, half + 2.0**-20
    accepted = Accepted(
        value=half.bfloat16(), low=low.bfloat16(), high=high.bfloat16(), exact=half,
        bound=torch.tensor([2.0**-20], dtype=torch.float64), zone=torch.tensor([False]),
    )  # fmt: skip
    near = torch.tensor([1.0, 1.0078125, 1.015625], dtype=torch.bfloat16)
    assert [bool(accepted.accepts(x.reshape(1)).all()) for x in near] == [True, True, False]


def test_sum_bound_accepts_fp32_in_any_order_and_rejects_a_missing_element() -> None:
    recipe = Recipe(layout="list", sizes=(900, 101), regime="ordinary", seed=2)
    case = generate(operation_named("global_norm", "test"), "fp32", recipe)
    (accepted,) = accepted_outputs(case, "bounded")["norm"]
    flat = torch.cat(list(case.lists["grads"]))
    assert bool(accepted.accepts(flat.square().sum().sqrt()).all())
    backwards = flat.flip(0).square().cumsum(0)[-1].sqrt()
    assert bool(accepted.accepts(backwards).all())
    largest = flat.abs().argmax()
    rest = torch.cat([flat[:largest], flat[largest + 1 :]])
    assert not bool(accepted.accepts(rest.square().sum().sqrt()).all())
