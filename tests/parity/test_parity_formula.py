"""Roundings that a kernel may make on the host, under `formula`."""

from dataclasses import replace

import pytest
import torch

from twinstep.parity.cases.covering import covering_recipes
from twinstep.parity.cases.generate import generate
from twinstep.parity.cases.guarded_memory import GuardedMemory
from twinstep.parity.expected.formula import formulated
from twinstep.parity.expected.outputs import truths
from twinstep.parity.operations.table import operation_named
from twinstep.replay.shadow64.lift import Wide


def wrong(max_norm: float, *, by: float, arithmetic: str = "exact") -> set[str]:
    """Lists of an `apex_lamb_step` that differ from the formula, where all is off by a factor.

    The norm of all gradients and the factor are numbers whose product is rounded in fp32.
    """
    operation = operation_named("apex_lamb_step", "test")
    controls = {"norm": 5.3, "factor": 0.37, "max_norm": max_norm}
    (drawn,) = covering_recipes(operation, "bf16", ("list",), 1, None)
    recipe = replace(drawn, sizes=(64, 7), regime="ordinary", controls=controls)
    case = generate(operation, "bf16", recipe)
    wide = {
        place: Wide(truth.exact * by, torch.ones_like(truth.exact, dtype=torch.bool), "")
        for place, truth in truths(case, rounded=True).items()
    }
    rows = formulated(wide, False, GuardedMemory.of(case, torch.device("cpu")), arithmetic)
    return {row.span.name for row in rows if bool(row.wrong().any())}


@pytest.mark.parametrize("max_norm", [0.7, 0.0, 1e30])
@pytest.mark.parametrize("arithmetic", ["exact", "bounded"])
def test_products_of_controls_may_be_rounded_on_the_host(max_norm: float, arithmetic: str) -> None:
    assert wrong(max_norm, by=1.0, arithmetic=arithmetic) == set()


@pytest.mark.parametrize("max_norm", [0.0, 1e30])
def test_where_nothing_is_clipped_a_wrong_formula_is_seen(max_norm: float) -> None:
    assert wrong(max_norm, by=1.0 + 1e-9) >= {"exp_avgs", "exp_avg_sqs", "params"}
    off = wrong(max_norm, by=1.0 + 1e-5, arithmetic="bounded")
    assert off >= {"exp_avgs", "exp_avg_sqs", "params"}
