"""Derived bounds: honest arithmetic passes, a wrong formula does not, and the zones are narrow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from twinstep.parity.cases.case import Case, Recipe
from twinstep.parity.cases.generate import generate
from twinstep.parity.expected.accepted import Accepted
from twinstep.parity.expected.outputs import accepted_outputs
from twinstep.parity.operations.operation import Bound
from twinstep.parity.operations.table import operation_named, operations
from twinstep.reference import norm

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


@pytest.mark.parametrize("dims", [0, 1, 2])
@pytest.mark.parametrize("combination", ["mixed", "bf16"])
def test_each_of_many_tensors_has_the_interval_that_it_has_alone(
    combination: str, dims: int
) -> None:
    recipe = replace(adamw_case().recipe, sizes=(3, 1, 0, 2) * 4, dims=dims)
    case = generate(operation_named("adamw_step", "test"), combination, recipe)
    together = accepted_outputs(case, "bounded")
    for at in range(case.length):
        alone = accepted_outputs(case.taken([at]), "bounded")
        for name in (name for name, rows in alone.items() if rows):
            for field, part in vars(alone[name][0]).items():
                found = getattr(together[name][at], field)
                torch.testing.assert_close(found, part, rtol=0, atol=0, equal_nan=True)


def test_bound_is_a_few_ulp_on_ordinary_values() -> None:
    (accepted, _) = accepted_outputs(adamw_case(regime="ordinary"), "bounded")["exp_avg_sqs"]
    assert accepted.bound is not None
    relative = (accepted.bound / accepted.value.double().abs()).max().item()
    assert 2.0**-24 < relative < 2.0**-20


@pytest.mark.parametrize(
    ("name", "moment", "options"),
    [
        ("adam_step", "exp_avgs", {"bias_correction": True}),
        ("adamw_step", "exp_avgs", {"bias_correction": True}),
        ("sgd_step", "momentums", {"nesterov": False}),
    ],
)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_decay_of_zero_may_be_left_out_for_a_weight_that_is_not_finite(
    name: str, moment: str, options: dict[str, bool], bad: float
) -> None:
    recipe = Recipe(layout="list", sizes=(3,), regime="ordinary", options=options)
    drawn = generate(operation_named(name, "tests"), "fp32", recipe)
    finite = drawn.with_controls(weight_decay=0.0, found_inf=0.0, factor=1.0, lr=0.25)
    case = replace(finite, lists={**finite.lists, "params": [torch.tensor([bad, 1.0, 2.0])]})
    left_out = accepted_outputs(case, "bounded")
    decayed = accepted_outputs(case.with_controls(weight_decay=0.5), "bounded")
    plain = accepted_outputs(finite, "bounded")[moment][0].value[0]
    for argument, kept in (("params", torch.tensor(bad)), (moment, plain)):
        (accepted,) = left_out[argument]
        first = torch.tensor([True, False, False])
        for value, taken in ((accepted.value[0], True), (kept, True), (plain * 1.5 + 1.0, False)):
            assert bool(accepted.accepts(accepted.value.where(~first, value))[0]) == taken
        assert not bool(accepted.accepts(accepted.value * 1.5 + 1.0)[1])
    in_moments = name != "adamw_step"
    assert bool(decayed[moment][0].accepts(plain.expand(3))[0]) != in_moments


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


ALONE = {"lr": 1.0, "beta1": 0.0, "beta2": 0.0, "eps": 0.0, "weight_decay": 0.0, "factor": 1.0}
FREE = {**ALONE, "max_coeff": 1e30, "min_coeff": 0.0}
LAMB = Recipe(
    layout="flat",
    sizes=(2,),
    regime="zeros",
    controls=FREE,
    options={"bias_correction": False, "eps_inside_sqrt": False},
)


def lamb_case(params: list[float], grads: list[float], **controls: float) -> Case:
    """LAMB on one tensor without state, fp32."""
    recipe = replace(LAMB, sizes=(len(params),), controls={**FREE, **controls})
    case = generate(operation_named("lamb_step", "test"), "fp32", recipe)
    values = {"params": params, "grads": grads}
    lists = {
        name: [torch.tensor(values.get(name, [0.0] * len(params)), dtype=t.dtype)]
        if t.dim()
        else [torch.zeros_like(t)]
        for name, ts in case.lists.items()
        for t in ts[:1]
    }
    return case.with_lists({**{name: [] for name in case.lists}, **lists})


def lamb_float64(case: Case) -> Tensor:
    """The new weights, with nothing rounded or overflowing on the way."""
    c = {name: value.double() for name, value in case.controls.items()}
    p, g = (case.lists[name][0].double() for name in ("params", "grads"))
    g = g * c["factor"]
    m = (1 - c["beta1"]).float().double() * g + c["beta1"].float().double() * case.lists[
        "exp_avgs"
    ][0].double()
    v = (1 - c["beta2"]) * g * g
    u = m / (v.sqrt() + c["eps"])
    w, n = p.norm(), u.norm()
    rho = (w / n).clamp(c["min_coeff"], c["max_coeff"]) if w != 0 and n != 0 else torch.ones(())
    return (p - c["lr"] * rho * u).float()


OVERFLOWS = {
    "square": lamb_case([2.0**40], [2.0**80]),
    "norm of the weights": lamb_case([3e38, 3e38], [1.0, -1.0], lr=1e-30),
    "norm of the direction": lamb_case([1.0, 1.0], [3e38, -3e38], beta2=1.0, eps=1.0, lr=1e-30),
}


@pytest.mark.parametrize("name", OVERFLOWS)
def test_lamb_in_float64_is_accepted_where_fp32_overflows(name: str) -> None:
    case = OVERFLOWS[name]
    (accepted,) = accepted_outputs(case, "bounded")["params"]
    assert bool(accepted.accepts(lamb_float64(case)).all())
    assert bool(accepted.accepts(accepted.value).all())


def test_the_branch_that_overflows_has_errors_of_its_own() -> None:
    """The norm of the weights overflows in fp32, and the ratio is 1e30, not 2."""
    weights, grads = [3e38, 3e38, 1.0], [0.7, 0.7, 0.3]
    case = lamb_case(weights, grads, lr=1e-3, weight_decay=0.5, max_coeff=1e30, min_coeff=1e-6)
    (accepted,) = accepted_outputs(case, "bounded")["params"]
    assert accepted.value[2].item() == pytest.approx(-1.5e27)
    narrow = torch.tensor([0.0, 0.0, 1.0])
    for away, right in ((6 * 2.0**-23, True), (-6 * 2.0**-23, True), (-(2.0**-16), False)):
        got = accepted.value * (1 - away * narrow)
        assert bool(accepted.accepts(got)[2]) is right
    assert bool(accepted.accepts(torch.tensor([3e38, 3e38, 0.997]))[2])


def test_a_norm_that_may_round_to_zero_leaves_both_branches_open() -> None:
    grads, moments = (
        float(torch.tensor(b, dtype=torch.int32).view(torch.float32))
        for b in (-0x4568_355A, 0x38F2_DDD6)
    )
    case = lamb_case([1.0], [grads], beta1=0.95, max_coeff=40.0, factor=1.9, lr=20.0)
    (settled,) = accepted_outputs(case, "bounded")["params"]
    assert settled.bound is not None
    assert bool((settled.bound < 1e-3).all())
    case = case.with_lists({**case.lists, "exp_avgs": [torch.tensor([moments])]})
    (accepted,) = accepted_outputs(case, "bounded")["params"]
    assert accepted.value.item() == 1.0  # the reference's direction is zero, its ratio one
    assert lamb_float64(case).item() > 1.0 + 8 * 2.0**-23
    assert bool(accepted.accepts(lamb_float64(case)).all())


def test_a_direction_of_zeros_alone_keeps_its_branch() -> None:
    case = lamb_case([1.0, -2.0], [0.0, 0.0], beta1=0.5, beta2=0.5, eps=0.5)
    (accepted,) = accepted_outputs(case, "bounded")["params"]
    assert bool(accepted.accepts(torch.tensor([1.0, -2.0])).all())
    for wrong in (1.0 + 2.0**-20, float("nan"), float("inf")):
        assert not bool(accepted.accepts(torch.tensor([wrong, -2.0])).all())


def test_sign_of_zero_counts_for_exact_kernels_only() -> None:
    recipe = Recipe(layout="flat", sizes=(3,), regime="zeros", controls={"inv_scale": 1.0})
    case = generate(operation_named("unscale", "test"), "fp32", recipe)
    case = case.with_lists({"grads": [torch.tensor([-0.0, 1.5, 3.0])]})
    positive = torch.tensor([0.0, 1.5, 3.0])
    (bounded,) = accepted_outputs(case, "bounded")["grads"]
    (exact,) = accepted_outputs(case, "exact")["grads"]
    assert bounded.accepts(positive).tolist() == [True, True, True]
    assert exact.accepts(positive).tolist() == [False, True, True]
    for wrong in (torch.tensor([0.0, 1.5000001, 0.0]), torch.tensor([0.0, -1.5, float("nan")])):
        assert bounded.accepts(wrong).tolist()[1:] == [False, False]


def test_bounds_leave_the_norm_of_other_threads_alone() -> None:
    plain = norm.root_of_squares
    case = generate(
        operation_named("lamb_step", "test"),
        "fp32",
        replace(LAMB, layout="list", sizes=(40, 3), regime="ordinary", seed=3),
    )
    alone = accepted_outputs(case, "bounded")["params"]
    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(lambda _: accepted_outputs(case, "bounded")["params"], range(4)))
        roots = list(pool.map(lambda _: norm.l2_norm([torch.tensor([3.0, 4.0])]), range(4)))
    assert norm.root_of_squares is plain
    assert all(type(root) is Tensor and root.item() == 5.0 for root in roots)
    for row in rows:
        assert all(torch.equal(a.bound, b.bound) for a, b in zip(row, alone, strict=True))  # type: ignore[arg-type]
