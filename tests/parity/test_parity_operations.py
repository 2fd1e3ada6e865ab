"""Operations describe their references truly, and their page is current."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from twinstep.parity.cases.case import Recipe
from twinstep.parity.cases.generate import generate
from twinstep.parity.cases.regimes import REGIMES
from twinstep.parity.cli.operations_page import render
from twinstep.parity.expected.ulp import same
from twinstep.parity.operations.operation import Operation, Role
from twinstep.parity.operations.signature import check_signature
from twinstep.parity.operations.table import HOUSE, operation_named

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "operations.md"
BY_NAME = pytest.mark.parametrize("operation", HOUSE, ids=lambda operation: operation.name)


def recipe_of(operation: Operation, regime: str = "mixture") -> Recipe:
    options = {option.name: option.choices[0] for option in operation.options}
    return Recipe(layout="list", sizes=(5, 0, 33), regime=regime, seed=4, options=options)


@BY_NAME
def test_reference_has_the_signature_of_its_operation(operation: Operation) -> None:
    check_signature(operation.reference, operation, "test")


@BY_NAME
def test_reference_returns_what_is_written_and_mutates_nothing(operation: Operation) -> None:
    for dtype in operation.combinations:
        case = generate(operation, dtype, recipe_of(operation))
        kept = {name: [t.clone() for t in tensors] for name, tensors in case.lists.items()}
        results = case.reference()
        assert tuple(results) == operation.writes
        for name, tensors in results.items():
            like = case.lists.get(name, [case.controls.get(name)])
            assert [t.dtype for t in tensors] == [t.dtype for t in like if t is not None]
            assert [t.shape for t in tensors] == [t.shape for t in like if t is not None]
        for name, tensors in kept.items():
            pairs = zip(tensors, case.lists[name], strict=True)
            assert all(bool(same(a, b).all()) for a, b in pairs)


@BY_NAME
@pytest.mark.parametrize("regime", REGIMES)
def test_the_same_recipe_makes_the_same_case(operation: Operation, regime: str) -> None:
    dtype = list(operation.combinations)[-1]
    one, two = (generate(operation, dtype, recipe_of(operation, regime)) for _ in range(2))
    for name, tensors in one.lists.items():
        pairs = zip(tensors, two.lists[name], strict=True)
        assert all(bool(same(a, b).all()) for a, b in pairs)


@BY_NAME
def test_only_the_planted_regime_has_non_finite_values(operation: Operation) -> None:
    for regime in REGIMES:
        for dtype in operation.combinations:
            case = generate(operation, dtype, recipe_of(operation, regime))
            tensors = [t for ts in case.lists.values() for t in ts if t.is_floating_point()]
            strange = sum(int((~t.isfinite()).sum()) for t in tensors)
            assert strange <= (1 if regime == "planted" else 0)


@BY_NAME
def test_second_moments_are_never_negative(operation: Operation) -> None:
    for regime in REGIMES:
        case = generate(operation, next(iter(operation.combinations)), recipe_of(operation, regime))
        for name in operation.lists_of(Role.SQUARE):
            assert all(bool((t.nan_to_num(0.0) >= 0).all()) for t in case.lists[name])


@BY_NAME
def test_every_control_is_drawn_at_its_customary_value_and_elsewhere(operation: Operation) -> None:
    customary = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.01, "scale": 1.0, "norm": 1.0}
    customary |= {"momentum": 0.9, "factor": 1.0, "inv_scale": 1.0, "max_norm": 1.0}
    customary |= {"scale_factor": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5}
    customary |= {"min_scale": 1.0, "scale_window": 1000, "growth_interval": 2000}
    for control in operation.controls:
        if control.name in customary and not control.output:
            assert customary[control.name] in control.values[1:]
    names = {control.name for control in operation.controls}
    pairs = {(row.get("beta1"), row.get("beta2")) for row in operation.together}
    assert "beta1" not in names or {(0.9, 0.999), (0.9, 0.95)} <= pairs
    assert all(set(row) <= set(operation.keywords) for row in operation.together)


def test_ties_lie_halfway_between_neighbours_of_the_copy() -> None:
    operation = operation_named("cast_copy", "test")
    recipe = Recipe(layout="list", sizes=(400,), regime="ties", seed=1)
    for dtype in ("fp16", "bf16"):
        case = generate(operation, dtype, recipe)
        (source,), (copy,) = case.lists["sources"], case.lists["copies"]
        rounded = source.to(copy.dtype)
        side = torch.where(rounded.double() < source.double(), torch.inf, -torch.inf)
        away = torch.nextafter(rounded, side.to(rounded.dtype))
        halfway = (rounded.double() + away.double()) / 2 == source.double()
        assert int(halfway.sum()) > 40


def test_page_of_operations_is_current() -> None:
    assert PAGE.read_text() == render(), (
        "run python -m twinstep.parity.cli.operations_page > docs/reference/operations.md"
    )
