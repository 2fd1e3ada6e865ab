"""Bounds are tight: kernels close to them pass, those three bounds off fail, a search climbs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.profile import LONG
from twinstep.parity.cases.case import Recipe
from twinstep.parity.cases.covering import covering_recipes
from twinstep.parity.cases.generate import generate
from twinstep.parity.laws.finding import Finding
from twinstep.parity.laws.value import plan
from twinstep.parity.operations.operation import Operation
from twinstep.parity.operations.table import operation_named
from twinstep.parity.proof.corpus import harmless
from twinstep.parity.proof.corpus.bound_pairs import (
    CONSTRUCTED,
    DETERMINED,
    FAR,
    REACHED,
    as_written,
    near,
    off_by,
    pairs,
)
from twinstep.parity.proof.corpus.judged import row_of
from twinstep.parity.registry.engines import engine_named
from twinstep.parity.registry.kernels import Kernel
from twinstep.parity.runner.error_search import ErrorSearch, _changed
from twinstep.parity.runner.run_plan import PlanRunner

CASES = 16
SAMPLE = [next(group) for _, group in itertools.groupby(pairs(), lambda pair: pair[0].name)]
JUDGED = pairs() if LONG else [*SAMPLE, (operation_named("unscale", "test"), "bf16")]
NAMES = [f"{operation.name}-{dtype}" for operation, dtype in JUDGED]


def searched(
    kernel: Kernel, dtype: str, cases: int, climbing: bool, enough: float = 10.0
) -> tuple[Finding | None, dict[str, float], int]:
    """The first violation, worst error over bound by output, and the number of cases."""
    runner, search = PlanRunner(kernel, engine_named("cpu")), ErrorSearch()
    recipes = covering_recipes(kernel.operation, dtype, kernel.layouts, cases, 0)
    for number, recipe in enumerate(recipes):
        case = generate(kernel.operation, dtype, recipe)
        if climbing and number >= cases // 2:
            case = search.next() or case
        finding = runner.violation(plan(case, "bounded"))
        if finding is not None or max(runner.worst.values(), default=0.0) >= enough:
            return finding, runner.worst, number + 1
        search.see(case, runner.scores)
    return None, runner.worst, cases


@pytest.mark.parametrize(("operation", "dtype"), JUDGED, ids=NAMES)
def test_a_kernel_near_its_bound_passes(operation: Operation, dtype: str) -> None:
    finding, worst, _ = searched(near(operation), dtype, 4 * CASES, True, REACHED)
    assert finding is None
    assert max(worst.values()) >= REACHED, worst


@pytest.mark.parametrize(("operation", "dtype"), JUDGED, ids=NAMES)
def test_a_kernel_three_bounds_off_fails(operation: Operation, dtype: str) -> None:
    finding, worst, _ = searched(off_by(operation, FAR), dtype, 4 * CASES, True)
    assert finding is not None, worst


def test_where_every_honest_kernel_has_the_same_bits_the_reference_is_never_off() -> None:
    for name, dtype in DETERMINED:
        _, worst, _ = searched(as_written(operation_named(name, "test")), dtype, 4, False)
        assert not any(worst.values())


def test_constructed_kernels_stand_in_only_where_the_honest_one_stays_far_away() -> None:
    for name in CONSTRUCTED:
        operation = operation_named(name, "test")
        dtype = next(iter(operation.combinations))
        _, worst, _ = searched(as_written(operation), dtype, CASES, True)
        assert max(worst.values()) < REACHED


@pytest.mark.parametrize("name", ["torch_adamw_fused", "moments_by_fused_instructions"])
def test_climbing_finds_a_worse_error_than_as_many_random_cases(name: str) -> None:
    kernel = row_of(next(variant for variant in harmless() if variant.name == name))
    _, random, _ = searched(kernel, "fp32", CASES, climbing=False)
    _, climbed, _ = searched(kernel, "fp32", CASES, climbing=True)
    better = {output: climbed[output] > random[output] for output in random}
    assert sum(better.values()) > len(better) / 2, (random, climbed)
    assert max(climbed.values()) > max(random.values())


def test_a_changed_case_keeps_every_shape() -> None:
    operation = operation_named("global_norm", "test")
    recipe = Recipe(layout="list", sizes=(1, 6, 12), seed=1)
    for dims in (0, 1, 3):
        case = generate(operation, "fp32", replace(recipe, dims=dims))
        shapes = [grad.shape for grad in case.lists["grads"]]
        changed = _changed(case, np.random.default_rng(0))
        assert [grad.shape for grad in changed.lists["grads"]] == shapes
