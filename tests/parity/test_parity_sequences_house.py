"""Our optimizers and the reference, driven by the same random sequences of actions.

`make parity` drives a few sequences of each; here a few others, the same in every run. The long
profile draws anew, more, and builds the wrappers of every combination of options.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from random import Random, SystemRandom

import pytest
from hypothesis import settings
from rich.console import Console

from tests.helpers.profile import LONG
from twinstep.fast.optimizers.fp16_unfused import FP16UnfusedOptimizer
from twinstep.fast.optimizers.zero import ZeroOptimizer
from twinstep.parity.proof.corpus.optimizers import Optimizer, twin_of
from twinstep.parity.records.ledger import Cell, Ledger, Status
from twinstep.parity.registry.engines import engine_named
from twinstep.parity.report.exports import as_json
from twinstep.parity.report.table import print_table
from twinstep.parity.sequences.drawing import sequence
from twinstep.parity.sequences.drive import Side, run
from twinstep.parity.sequences.fp16_rules import FP16Rules
from twinstep.parity.sequences.house_optimizers import register_our_optimizers
from twinstep.parity.sequences.judge import TwinEffort, judge_twin, twin_engine, twin_key
from twinstep.parity.sequences.registry import (
    DTYPES,
    Twin,
    borrowed_twins,
    register_optimizer,
    twins,
)
from twinstep.parity.sequences.world import Value

SEQUENCES = settings().max_examples if LONG else 8
# For twins whose other dtypes are judged already, and those with little inside.
FEW = min(240, SEQUENCES)
OVER_RANKS = 200 if LONG else 2
WRAPPERS = ("BF16Optimizer", "FP16Optimizer", "FP16UnfusedOptimizer", "ZeroOptimizer")
OPTIMIZERS = ("FusedAdam", "FusedLamb", "FusedLAMB", *WRAPPERS)
SCALERS = ("DynamicLossScale", "StaticLossScale")
SEED = SystemRandom().randrange(2**31) if LONG else 1


@pytest.fixture
def ours() -> Iterator[dict[str, Twin]]:
    with borrowed_twins():
        register_our_optimizers()
        register_our_optimizers()
        yield {twin.name: twin for twin in twins()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*OPTIMIZERS, *SCALERS])
def test_ours_keeps_step_with_the_reference(ours: dict[str, Twin], name: str, dtype: str) -> None:
    twin = ours[f"fast.{name}"]
    if LONG and isinstance(twin.rules, FP16Rules):
        twin = replace(twin, rules=type(twin.rules)(wide=True))
    # `FusedLAMB` claims one combination, for the sake of time: its loops are those of `FusedLamb`.
    many = name in OPTIMIZERS and dtype != "mixed" and dtype in twin.dtypes
    twin = replace(twin, dtypes=tuple(DTYPES))
    count = SEQUENCES if many else FEW
    effort = TwinEffort(sequences=count, over_ranks=OVER_RANKS, seed=SEED, repros=None)
    cell = judge_twin(twin, dtype, twin_engine(twin), effort)
    assert cell.status is Status.PASSED, cell.failure
    assert cell.over_ranks == OVER_RANKS * (twin.over_ranks() is not None)
    assert cell.sequences == count + cell.over_ranks


def test_sequences_are_as_long_as_is_said(ours: dict[str, Twin]) -> None:
    """Sixteen actions and the construction, with a motif among most of them; few are long."""
    for twin in ours.values():
        drawn = [sequence(twin.rules, SEED, "bf16", number) for number in range(150)]
        assert abs(sum(map(len, drawn)) / len(drawn) - 22) < 4


class Derived(FP16UnfusedOptimizer):
    """Nothing of its own."""


def test_a_class_derived_from_ours_has_the_same_private_attributes() -> None:
    with borrowed_twins():
        register_optimizer(reference="FP16UnfusedOptimizer", arithmetic="exact")(Derived)
        (twin,) = (twin for twin in twins() if twin.subject is Derived)
    effort = TwinEffort(sequences=3, over_ranks=1, seed=SEED, repros=None)
    cell = judge_twin(twin, "fp16", engine_named("replay"), effort)
    assert cell.status is Status.PASSED, cell.failure


def test_every_twin_of_ours_is_driven(ours: dict[str, Twin]) -> None:
    places = ("fast", "native")
    assert set(ours) == {f"{at}.{name}" for at in places for name in (*OPTIMIZERS, *SCALERS)}


def test_a_wrapper_may_be_built_of_every_combination() -> None:
    few, many = FP16Rules().actions()["build"], FP16Rules(wide=True).actions()["build"]
    assert set(few.choices["recipe"]) < set(many.choices["recipe"])


def test_the_table_and_the_json_count_sequences_and_actions(ours: dict[str, Twin]) -> None:
    twin = ours["fast.FusedAdam"]
    key = twin_key(twin, "bf16", twin_engine(twin))
    cell = Cell(key=key, status=Status.PASSED, sequences=150, over_ranks=25, calls=1951)
    ledger = Ledger(declared=(key,), cells={key: cell})
    told = StringIO()
    print_table(Console(file=told, width=80), ledger, verbose=True)
    assert re.search(r"fast\.FusedAdam +\w+ +bf16 +1 +150", told.getvalue())
    assert "150 sequences, 25 of them over ranks, 1951 actions" in told.getvalue()
    row = json.loads(as_json(ledger, 1.0))["cells"][0]
    assert (row["sequences"], row["over_ranks"], row["calls"]) == (150, 25, 1951)


def test_an_overflow_at_the_floor_is_no_difference_of_zero() -> None:
    """Ours raise when something is read, the reference in the step; both go on alike."""
    twin = twin_of(Optimizer(cls=ZeroOptimizer, says="", reference="ZeroOptimizer"))
    known, dice = twin.rules.actions(), Random(0)
    floor: dict[str, Value] = {
        "seed": 2790,
        "groups": 3,
        "stage": 2,
        "scale": "dynamic",
        "omitted": False,
    }
    loud: dict[str, Value] = {"seed": 0, "regime": "extreme", "missing": 0, "micros": 1}
    acts = [known["build"].draw(dice, floor), *(known["train"].draw(dice, loud),) * 3]
    want = Side(twin.reference, twin.rules, "fp16", "cpu")
    for act in acts:
        want.carry_out(act)
    assert want.outcome["raised"] == "MinimumLossScale"
    assert run(twin, "fp16", "cpu", acts) is None
