"""What compiled code costs: charged where it is there, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from twinstep.parity.cases.case import Case, Recipe
from twinstep.parity.cases.generate import generate
from twinstep.parity.expected.instruction_error import (
    CPU,
    IEEE,
    UNKNOWN,
    InstructionError,
    instruction_error_of,
    relative_errors,
)
from twinstep.parity.expected.outputs import accepted_outputs
from twinstep.parity.laws.value import plan
from twinstep.parity.operations.table import operation_named
from twinstep.parity.proof.corpus import harmless
from twinstep.parity.proof.corpus.judged import row_of
from twinstep.parity.registry.engines import engine_named, running
from twinstep.parity.runner.run_plan import PlanRunner
from twinstep.replay import Launch
from twinstep.replay.isa.documented import CHARGES

QUOTIENTS, ROOTS = relative_errors("div", "rcp", "rsqrt"), relative_errors("sqrt", "rsqrt")
UNUSED = ("ex2", "lg2", "sin", "cos", "tanh")


def launch(*opcodes: str, approximate: tuple[str, ...] = ()) -> Launch:
    record = Launch("k", (1, 1, 1), (32, 1, 1), "")
    record.opcodes.update(opcodes)
    record.approximations.update(approximate)
    return record


def adamw_case(regime: str = "ordinary") -> Case:
    recipe = Recipe(layout="list", sizes=(300, 7), regime=regime, seed=4,
                    options={"bias_correction": True})  # fmt: skip
    return generate(operation_named("adamw_step", "test"), "bf16", recipe)


def bound(
    instruction_error: InstructionError, output: str, regime: str = "ordinary"
) -> torch.Tensor:
    (accepted, _) = accepted_outputs(adamw_case(regime), "bounded", instruction_error)[output]
    assert accepted.bound is not None
    return accepted.bound


def test_every_documented_instruction_is_charged_or_is_in_no_formula() -> None:
    named = {name for name in CHARGES if not name.startswith(UNUSED)}
    assert named == QUOTIENTS.keys() | ROOTS.keys()


def test_charges_are_the_documented_numbers() -> None:
    assert QUOTIENTS["div.full.f32"] == 2.0**-22
    assert QUOTIENTS["rcp.approx.f32"] == ROOTS["sqrt.approx.f32"] == 2.0**-23
    assert ROOTS["rsqrt.approx.f32"] == 2.0**-22.9
    assert QUOTIENTS["rcp.approx.f64"] == 2.0**-20


def test_launches_are_charged_together() -> None:
    found = instruction_error_of([
        launch("mul.rn.f32", approximate=("div.full.f32",)),
        launch("sqrt.approx.ftz.f32", "ld.global.b32", approximate=("sqrt.approx.f32",)),
    ])  # fmt: skip
    assert found.quotient == 2.0**-22
    assert found.root == 2.0**-23
    assert found.flushed == {"sqrt"}
    assert instruction_error_of([launch("fma.rn.f32", "div.rn.f32")]) == IEEE
    assert instruction_error_of([launch("red.global.add.f32")]).flushed == {"add"}


def test_approximate_division_widens_updates_and_leaves_moments_alone() -> None:
    fast = InstructionError(quotient=2.0**-22)
    assert bool((bound(fast, "params") > bound(IEEE, "params")).any())
    assert torch.equal(bound(fast, "exp_avgs"), bound(IEEE, "exp_avgs"))
    assert bool((bound(CPU, "params") <= bound(UNKNOWN, "params")).all())


def test_flushing_costs_ordinary_values_nothing_and_subnormals_themselves() -> None:
    flushing = InstructionError(flushed=frozenset({"add", "mul", "div", "sqrt"}))
    ordinary = bound(flushing, "exp_avgs") / bound(IEEE, "exp_avgs")
    assert float(ordinary.max()) < 1.0 + 1e-6
    (accepted, _) = accepted_outputs(adamw_case("subnormal"), "bounded", flushing)["exp_avgs"]
    assert bool(accepted.accepts(torch.zeros_like(accepted.value)).any())
    (strict, _) = accepted_outputs(adamw_case("subnormal"), "bounded", IEEE)["exp_avgs"]
    nonzero = strict.value.abs() > 2.0**-140
    assert bool(nonzero.any())
    assert not bool(strict.accepts(torch.zeros_like(strict.value))[nonzero].any())


@pytest.mark.parametrize(
    ("name", "approximate"),
    [("triton_contracted", ()), ("triton_fast_division", ("div.full.f32", "sqrt.approx.f32"))],
)
def test_judge_reads_the_charges_from_the_code_that_ran(
    name: str, approximate: tuple[str, ...]
) -> None:
    variant = next(v for v in harmless() if v.name == name)
    engine = engine_named("replay")
    runner = PlanRunner(row_of(variant), engine)
    with running(engine):
        assert runner.violation(plan(adamw_case(), "bounded")) is None
    assert runner.instruction_error.approximate == approximate
