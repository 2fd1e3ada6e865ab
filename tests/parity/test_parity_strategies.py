"""Strategies of cases: our kernels agree with the reference on all of them, wrong ones do not."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from twinstep.parity.cases.case import Case
from twinstep.parity.operations.table import operation_named
from twinstep.parity.proof.corpus.judged import row_of
from twinstep.parity.proof.corpus.wrong_by_input import SHELF
from twinstep.parity.records.errors import UsageError
from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import Kernel, kernels, registrations
from twinstep.parity.strategies import cases, violation

OURS = ("adamw_step", "unscale", "update_scale_dynamic", "clip_factor")


@cache
def house() -> dict[str, Kernel]:
    with registrations():
        register_house()
        return {row.operation.name: row for row in kernels() if row.name.startswith("triton.")}


def of_our_kernels(name: str) -> st.SearchStrategy[Case]:
    combinations = tuple(operation_named(name, "test").combinations)
    return st.sampled_from(combinations[:3]).flatmap(lambda combination: cases(name, combination))


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.sampled_from(OURS).flatmap(of_our_kernels))
def test_our_kernels_agree_with_the_reference(case: Case) -> None:
    assert violation(house()[case.operation.name], case) == ""


def test_a_wrong_kernel_is_found_and_its_case_is_small() -> None:
    entry = next(entry for entry in SHELF if entry.name == "rate_taken_without_its_sign")
    row = row_of(entry)
    search = settings(max_examples=100, deadline=None, database=None, derandomize=True)
    strategy = cases(entry.operation, "bf16")
    case = find(strategy, lambda case: bool(violation(row, case)), settings=search)
    assert case.length == 1
    assert "breaks `value`" in violation(row, case)


def test_what_there_is_not_is_named() -> None:
    with pytest.raises(UsageError, match="adamw_step has no bf61, but one of fp32, fp16"):
        cases("adamw_step", "bf61")
    with pytest.raises(UsageError, match="is not registered"):
        violation(of_our_kernels, find(cases("clip_factor", "scalar"), lambda case: True))
