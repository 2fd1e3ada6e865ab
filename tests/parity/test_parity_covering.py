"""A covering is the same everywhere, shows every value, and few cases cover much."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinstep.parity.cases.coverage import Coverage
from twinstep.parity.cases.covering import TURNS, covering_recipes, factors
from twinstep.parity.cases.generate import generate
from twinstep.parity.operations.operation import Operation
from twinstep.parity.operations.table import HOUSE, operation_named

WITH_LISTS = [operation for operation in HOUSE if operation.lists]
PRINTS = """
from twinstep.parity.cases.covering import covering_recipes
from twinstep.parity.operations.table import operation_named
print(covering_recipes(operation_named("adamw_step", "test"), "bf16", ("flat", "list"), 7, 5))
"""


def test_the_deck_does_not_depend_on_what_else_is_imported() -> None:
    run = [sys.executable, "-c"]
    alone = subprocess.run([*run, PRINTS], capture_output=True, text=True, check=True)
    loaded = "import twinstep.parity.proof.corpus, twinstep.fast, json, decimal\n" + PRINTS
    crowded = subprocess.run([*run, loaded], capture_output=True, text=True, check=True)
    assert alone.stdout == crowded.stdout != ""


@given(st.integers(0, 2**32), st.sampled_from(HOUSE), st.integers(1, 30))
def test_a_longer_deck_begins_with_the_shorter_one(seed: int, op: Operation, count: int) -> None:
    dtype = next(iter(op.combinations))
    short = covering_recipes(op, dtype, op.layouts, count, seed)
    assert short == covering_recipes(op, dtype, op.layouts, count + 5, seed)[:count]
    assert all(sum(recipe.sizes) for recipe in short if op.lists)


@pytest.mark.parametrize("operation", HOUSE, ids=lambda operation: operation.name)
def test_a_dozen_cases_show_every_value_of_every_control_and_option(operation: Operation) -> None:
    dtype = next(iter(operation.combinations))
    recipes = covering_recipes(operation, dtype, operation.layouts, len(TURNS), None)
    for control in operation.controls:
        assert {recipe.controls[control.name] for recipe in recipes} == set(control.values)
    for option in operation.options:
        assert {recipe.options[option.name] for recipe in recipes} == set(option.choices)


@pytest.mark.parametrize("operation", WITH_LISTS, ids=lambda operation: operation.name)
def test_a_dozen_cases_show_every_regime_at_every_size(operation: Operation) -> None:
    dtype = next(iter(operation.combinations))
    coverage = Coverage(operation)
    for recipe in covering_recipes(operation, dtype, operation.layouts, len(TURNS), None):
        coverage.add(generate(operation, dtype, recipe))
    pair = coverage.numbers()["regime x size"]
    assert isinstance(pair, list)
    # A norm keeps the loud regimes to themselves, or they would drown the others.
    assert pair[0] == pair[1] or "norm" in operation.writes


def test_another_seed_deals_other_cases_and_one_layout_is_enough() -> None:
    operation = operation_named("adamw_step", "test")
    one, two = (covering_recipes(operation, "bf16", ("flat",), 6, seed) for seed in (1, 2))
    assert one != two
    assert {recipe.layout for recipe in one} == {"flat"}
    assert "shape" in factors(operation, ("flat",))
