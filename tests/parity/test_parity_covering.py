"""A covering is the same everywhere, shows every value, and few cases cover much."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from twinstep.parity.cases.brink import on_the_brink
from twinstep.parity.cases.case import Recipe
from twinstep.parity.cases.coverage import Coverage
from twinstep.parity.cases.covering import (
    FADED,
    FADING,
    LARGE,
    LARGE_WHERE_SLOW,
    NUMEROUS,
    PERIOD,
    STEPS,
    TURNS,
    WHOLE,
    completed_steps,
    covering_recipes,
    crowd,
    diminished,
    enlarged,
    factors,
)
from twinstep.parity.cases.formats import FORMATS, non_finite_bits, subnormal_bits
from twinstep.parity.cases.generate import generate
from twinstep.parity.cases.planting import replaced
from twinstep.parity.expected.outputs import accepted_outputs
from twinstep.parity.laws import LAWS
from twinstep.parity.laws.base import Law
from twinstep.parity.operations.controls import LR
from twinstep.parity.operations.operation import Operation, Role
from twinstep.parity.operations.table import HOUSE, operation_named
from twinstep.parity.proof.corpus import corpus
from twinstep.parity.proof.corpus.judged import VERDICT_ONLY, judged
from twinstep.parity.records.ledger import Status
from twinstep.parity.registry.kernels import Kernel, register, registrations
from twinstep.parity.runner.recipes import Effort
from twinstep.parity.sequences.adam_rules import AdamRules
from twinstep.parity.sequences.bf16_rules import BF16Rules
from twinstep.parity.sequences.drawing import sequence
from twinstep.parity.sequences.fills import Dice
from twinstep.parity.sequences.fp16_rules import FP16Rules
from twinstep.parity.sequences.judge import SEQUENCES
from twinstep.parity.sequences.lamb_rules import LambRules
from twinstep.parity.sequences.parts import CROWDS, parameters
from twinstep.parity.sequences.rules import OptimizerRules

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
        shown = {recipe.controls[control.name] for recipe in recipes}
        assert shown >= set(control.values)
        # One more value is drawn, or several; a decision has none.
        assert (shown > set(control.values)) >= (control.range is not None)
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


@pytest.mark.parametrize("operation", WITH_LISTS, ids=lambda operation: operation.name)
def test_matrices_are_tall_and_wide_in_every_dtype_and_layout(operation: Operation) -> None:
    law = LAWS["boundary_sizes"]
    for dtype in operation.combinations:
        for layout in operation.layouts:
            coverage = Coverage(operation)
            recipe = Recipe(layout=layout, sizes=(3,), regime="ordinary")
            for case in law.vary(generate(operation, dtype, recipe)):
                coverage.add(case)
            shown = coverage.numbers()["matrices"]
            assert isinstance(shown, dict)
            assert shown.keys() >= {"tiny x block", "block x tiny", "tiny x large"}, layout


@pytest.mark.parametrize("seed", [None, 1, 2, 3, 4])
def test_a_kernel_that_leaves_out_columns_past_128_is_rejected(seed: int | None) -> None:
    entry = next(row for row in corpus() if row.name == "columns_past_128_left_out")
    effort = replace(VERDICT_ONLY, seed=seed)
    found = judged(entry, laws=("value", "boundary_sizes"), effort=effort)
    assert {key.dtype for key in found.cells} == set(entry.dtypes)
    assert {cell.status for cell in found.cells.values()} == {Status.FAILED}


@pytest.mark.parametrize("operation", WITH_LISTS, ids=lambda operation: operation.name)
def test_weights_require_gradients_only_where_there_are_weights(operation: Operation) -> None:
    dtype = next(iter(operation.combinations))
    coverage = Coverage(operation)
    for recipe in covering_recipes(operation, dtype, operation.layouts, len(TURNS), None):
        coverage.add(generate(operation, dtype, recipe))
    assert bool(coverage.flags["weights require grad"]) == bool(operation.lists_of(Role.PARAM))


def recipes_of(kernel: Kernel, law: Law, dtype: str) -> Iterator[Recipe]:
    count = Effort().cases(law, kernel)
    yield from covering_recipes(kernel.operation, dtype, kernel.layouts, count, None)


def kernel_of(operation: Operation) -> Kernel:
    def kernel(*lists: list[Tensor], **controls: object) -> None:
        """Take any arguments."""

    with registrations() as collected:
        register(operation.name, name="any", layouts=operation.layouts)(kernel)
    return collected[0]


@pytest.mark.parametrize(
    ("operation", "law"),
    [
        *((row, "skipped_step") for row in HOUSE if row.skippable),
        *((row, "value") for row in HOUSE if row.name.startswith("update_scale")),
        (operation_named("unscale", "test"), "non_finite"),
    ],
    ids=lambda one: one if isinstance(one, str) else one.name,
)
def test_overflow_meets_every_value_of_every_control(operation: Operation, law: str) -> None:
    kernel = kernel_of(operation)
    dtype = next(iter(operation.combinations))
    coverage = Coverage(operation)
    for recipe in LAWS[law].draw.of(list(recipes_of(kernel, LAWS[law], dtype)), 99):
        for case in LAWS[law].vary(generate(operation, dtype, recipe)):
            coverage.add(case)
    met = coverage.numbers()["overflow x setting"]
    assert isinstance(met, list)
    assert met[0] == met[1] > 5


@pytest.mark.parametrize("name", ["update_scale_dynamic", "mixed_step"])
def test_the_dynamic_rule_overflows_at_the_floor_with_and_without_an_error(name: str) -> None:
    operation = operation_named(name, "test")
    kernel = kernel_of(operation)
    law = LAWS["skipped_step" if operation.skippable else "value"]
    seen = set()
    for recipe in recipes_of(kernel, law, next(iter(operation.combinations))):
        settings = {**recipe.controls, **recipe.options}
        last = settings["cur_hysteresis"] == 1 and settings["scale"] == settings["min_scale"]
        overflow = settings["found_inf"] == 1.0 or operation.skippable
        if last and overflow and settings.get("rule", "dynamic") == "dynamic":
            seen.add((settings["raise_error_at_min_scale"], settings.get("exhausted")))
    assert {(True, 0), (False, 0)} <= seen


def test_combinations_see_other_rows_and_other_numbers() -> None:
    operation = operation_named("adamw_step", "test")
    for shared in (False, True):
        rows = [
            covering_recipes(operation, dtype, operation.layouts, 6, None, shared=shared)
            for dtype in operation.combinations
        ]
        rates = [tuple(recipe.controls["lr"] for recipe in recipes) for recipes in rows]
        assert len(set(rates)) == len(rates)
        drawn = {rate for row in rates for rate in row} - set(LR.values) - {1e-3, 3e-4}
        assert len(drawn) >= 4
        assert all(0 < rate <= 50 for rate in drawn)


def test_counters_pass_the_limits_of_fp32_and_int32() -> None:
    operation = operation_named("adamw_step", "test")
    steps = {
        int(step)
        for recipe in covering_recipes(operation, "fp32", operation.layouts, len(TURNS), None)
        for step in generate(operation, "fp32", recipe).lists["steps"]
    }
    assert {2**24 + 1, 2**31 - 1} <= steps
    assert any(step > 2**31 for step in steps)
    assert len(steps - {step for step in STEPS if isinstance(step, int)}) >= 4


def test_tensors_have_none_to_four_dimensions_and_a_large_one_repeats_a_small_one() -> None:
    operation = operation_named("adamw_step", "test")
    recipes = covering_recipes(operation, "fp32", operation.layouts, len(TURNS), None)
    params = [generate(operation, "fp32", recipe).lists["params"] for recipe in recipes]
    assert {tensor.dim() for tensors in params for tensor in tensors} == {0, 1, 2, 3, 4}
    large = generate(operation, "fp32", enlarged(operation, recipes[0], LARGE[0])).lists["params"]
    tensor = max(large, key=Tensor.numel).reshape(-1)
    assert 2**20 < tensor.numel() <= 2**21
    assert torch.equal(tensor[:PERIOD], tensor[PERIOD : 2 * PERIOD])


@pytest.mark.parametrize("name", [op.name for op in WITH_LISTS if op.takes_norms])
@pytest.mark.parametrize("beside", [(), (WHOLE,)])
def test_large_tensors_have_finite_results_where_a_norm_decides(
    name: str, beside: tuple[int, ...]
) -> None:
    operation = operation_named(name, "test")
    (recipe,) = covering_recipes(operation, "bf16", ("list",), 1, None)
    case = generate(operation, "bf16", enlarged(operation, recipe, LARGE_WHERE_SLOW, beside))
    results = case.reference()["params"]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in results)
    assert not torch.equal(results[1], case.lists["params"][1])


def test_matrices_are_tall_or_wide() -> None:
    operation = operation_named("adamw_step", "test")
    recipes = covering_recipes(operation, "fp32", ("list",), 24, None)
    shapes = [
        t.shape
        for recipe in recipes
        for t in generate(operation, "fp32", recipe).lists["params"]
        if t.dim() > 1
    ]
    assert any(shape[0] > 500 for shape in shapes)
    assert any(shape[-1] > 500 for shape in shapes)


def test_a_crowd_is_a_list_longer_than_a_table() -> None:
    operation = operation_named("global_norm", "test")
    (recipe,) = covering_recipes(operation, "fp32", ("list",), 1, None)
    grads = generate(operation, "fp32", crowd(operation, recipe, NUMEROUS[0])).lists["grads"]
    assert 1_025 <= len(grads) <= 1_400
    assert all(bool(grad.any()) for grad in grads)


def test_subnormals_are_now_and_then_all_far_below_the_normals() -> None:
    form = FORMATS[torch.float32]
    drawn = [subnormal_bits(np.random.default_rng(seed), 20, form) for seed in range(40)]
    largest = [int((bits & (form.sign - 1)).max()) for bits in drawn]
    assert sum(top < form.tiny // 4 for top in largest) >= 8
    assert sum(top > form.tiny // 2 for top in largest) >= 8


def test_tensors_of_one_size_have_two_alike_and_others_have_none() -> None:
    operation, twins = operation_named("adamw_step", "test"), 0
    for recipe in covering_recipes(operation, "bf16", ("list",), 24, None):
        params = generate(operation, "bf16", recipe).lists["params"]
        alike = [torch.equal(*pair) for pair in pairwise(params) if pair[0].any()]
        if len(set(recipe.sizes)) == 1 and params[-1].any():
            assert alike[-1]
            assert not any(alike[:-1])
            twins += 1
        elif min(recipe.sizes) > 5:
            assert not any(alike)
    assert twins >= 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_norm_on_the_brink_turns_with_the_last_place_of_its_sum(dtype: torch.dtype) -> None:
    rng, turned = np.random.default_rng(3), 0
    for _ in range(40):
        drawn = torch.from_numpy(rng.standard_normal(700) * 10.0 ** rng.uniform(-3, 0, 700))
        tensors = on_the_brink([drawn[:500].to(dtype), drawn[500:].to(dtype)], rng)
        assert [tensor.shape for tensor in tensors] == [(500,), (200,)]
        total = math.fsum(x * x for tensor in tensors for x in tensor.tolist())
        roots = {
            np.float32(math.sqrt(s)) for s in (math.nextafter(total, 0), math.nextafter(total, 9e9))
        }
        turned += len(roots) == 2
    assert turned == 40


def test_another_seed_deals_other_cases_and_one_layout_is_enough() -> None:
    operation = operation_named("adamw_step", "test")
    one, two = (covering_recipes(operation, "bf16", ("flat",), 6, seed) for seed in (1, 2))
    assert one != two
    assert {recipe.layout for recipe in one} == {"flat"}
    assert "shape" in factors(operation, ("flat",))


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_steps_are_drawn_where_the_last_of_a_bias_correction_goes(beta2: float) -> None:
    def drawn(turn: int) -> list[float]:
        return [completed_steps(turn, seed, beta2) * (1 - beta2) for seed in range(200)]

    wide, last = drawn(STEPS.index(FADING)), drawn(STEPS.index(FADED))
    assert min(wide) > 1.9
    assert max(wide) <= 17
    assert 10 <= min(last) < max(last) <= 11.5


def test_small_lists_have_a_tensor_with_the_last_of_its_correction() -> None:
    operation = operation_named("adamw_step", "test")
    recipes = covering_recipes(operation, "fp32", ("list",), 24, None)
    small = [diminished(recipe, at) for at, recipe in enumerate(recipes)]
    last = STEPS.index(FADED)
    met = [recipe for recipe in small if recipe.step <= last < recipe.step + len(recipe.sizes)]
    assert sum(recipe.options["bias_correction"] is True for recipe in met) >= 4


@pytest.mark.parametrize("arithmetic", ["bounded", "exact"])
def test_values_that_repeat_are_expected_as_those_of_one_period_are(arithmetic: str) -> None:
    operation = operation_named("adamw_step", "test")
    first, *_ = covering_recipes(operation, "bf16", ("list",), 1, None)
    case = generate(operation, "bf16", replace(first, sizes=(5, 40, 1), period=7))
    # A case that is not known to repeat is evaluated as it is.
    whole = replace(case, recipe=replace(case.recipe, period=0))
    one, two = (accepted_outputs(each, arithmetic) for each in (case, whole))
    for name, rows in one.items():
        for left, right in zip(rows, two[name], strict=True):
            torch.testing.assert_close(vars(left), vars(right), rtol=0, atol=0, equal_nan=True)


def test_a_tensor_that_does_not_repeat_is_evaluated_whole() -> None:
    operation = operation_named("adamw_step", "test")
    first, *_ = covering_recipes(operation, "bf16", ("list",), 1, None)
    case = generate(operation, "bf16", replace(first, sizes=(40,), period=7))
    changed = replaced(case, "grads", 0, torch.full((40,), 2.0).index_fill(0, torch.tensor(30), 5))
    got = accepted_outputs(changed, "exact")["exp_avgs"][0].value
    assert torch.equal(got, changed.reference()["exp_avgs"][0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_nans_of_all_ones_are_among_those_that_are_planted(dtype: torch.dtype) -> None:
    bits = set(non_finite_bits(FORMATS[dtype]).values())
    ones = 2 ** (8 * dtype.itemsize) - 1
    assert {ones, ones >> 1} <= bits


@pytest.mark.parametrize("rules", [AdamRules(), LambRules(), FP16Rules(), BF16Rules()])
def test_some_sequences_have_more_parameters_than_a_table_of_110(rules: OptimizerRules) -> None:
    drawn = [sequence(rules, 0, "fp32", number) for number in range(SEQUENCES)]
    crowds = [acts for acts in drawn if "crowd" in str(acts[0].values["extent"])]
    assert sum(len(acts) < 6 for acts in crowds) >= 5
    assert {acts[0].values["extent"] for acts in crowds} == set(CROWDS)
    for extent, count in CROWDS.items():
        assert len(parameters(Dice(1), "fp32", "cpu", 1, together=False, extent=extent)) == count
