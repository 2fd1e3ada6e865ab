"""Other projects' tests on our classes: the page, a sample of the cases, and what they notice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from twinstep.parity.proof.compat import of_apex, of_deepspeed
from twinstep.parity.proof.compat.cases import BY_NAME, Case, Differs, Outcome, Side, outcome
from twinstep.parity.proof.compat.of_torch import run_error, run_input
from twinstep.parity.proof.compat.page import PAGE, page

pytestmark = pytest.mark.usefixtures("replay")
EACH_SIDE = pytest.mark.parametrize("side", list(BY_NAME.values()), ids=lambda side: side.name)
LAMB_DEFAULTS = {
    "use_nvlamb": False,
    "grad_averaging": True,
    "bias_correction": True,
    "max_grad_norm": 1.0,
}
# Of each test the first case with few elements.
SAMPLE = [
    *(
        "dynamic_loss_scale some_overflow",
        "dynamic_loss_scale hysteresis (main)",
        "reported norm (main)",
    ),
    *(
        "bf16 grad norm guard",
        "unfused MoE clip norm",
        "loss scale validation (main)",
        "lr schedulers",
    ),
    *("checkpoint", "zero_grad", "signature", "step", "state_dict", "fused_lamb"),
]


def sampled() -> Iterator[Case]:
    seen = set()
    for case in (*of_deepspeed.cases(), *of_apex.cases()):
        if case.test in SAMPLE and case.test not in seen:
            seen.add(case.test)
            yield case


@EACH_SIDE
def test_a_sample_of_torchs_table_ends_as_there(side: Side) -> None:
    run_input(torch.optim.AdamW, {"lr": 0.01}, side)
    run_input(torch.optim.Adam, {"weight_decay": 0.1}, side)
    wrong = {"betas": (1.0, 0.0)}
    run_error(None, wrong, ValueError, side)
    with pytest.raises(Differs, match="ValueError for TypeError"):
        run_error(None, wrong, TypeError, side)


@EACH_SIDE
@pytest.mark.parametrize("case", list(sampled()), ids=lambda case: f"{case.test} {case.case}")
def test_a_sample_of_the_other_cases_ends_as_there(case: Case, side: Side) -> None:
    assert outcome(case, side) == Outcome(
        project=case.project, test=case.test, case=case.case, side=side.name
    )


def test_the_sample_has_a_case_of_each_named_test() -> None:
    assert {case.test for case in sampled()} == set(SAMPLE)


@contextmanager
def changed(case: Case, **classes: Any) -> Iterator[Outcome]:
    yield outcome(case, replace(BY_NAME["reference"], **classes))


def test_a_wrong_class_is_noticed() -> None:
    cases = {f"{case.test}, {case.case}": case for case in of_deepspeed.cases()}
    flat = BY_NAME["reference"].flat

    def deaf(*given: Any, **options: Any) -> Any:
        """Another floor than the config asks for."""
        args = {**options.pop("dynamic_loss_args"), "min_scale": 2.0}
        return flat(*given, **options, dynamic_loss_args=args)

    with changed(cases["dynamic_loss_scale all_overflow, flat, default"], flat=deaf) as found:
        assert (found.why, found.known) == (
            "Differs: scale after step 3 is 2.0, but should be 1.0",
            False,
        )
    late = partial(BY_NAME["reference"].adam, eps=1e-3)
    with changed(cases["adam as torch's, 127, float32, AdamW"], adam=late) as found:
        assert "from torch's" in found.why


@pytest.mark.parametrize(
    "option", ["use_nvlamb", "grad_averaging", "bias_correction", "max_grad_norm"]
)
def test_a_lamb_that_is_deaf_to_an_option_is_noticed(option: str) -> None:
    def deaf(*given: Any, **options: Any) -> Any:
        """The default, whatever is asked for."""
        return BY_NAME["reference"].apex_lamb(*given, **{**options, option: LAMB_DEFAULTS[option]})

    lambs = [case for case in of_apex.cases() if case.test.startswith("fused_lamb")]
    found = []
    for case in lambs:
        with changed(case, apex_lamb=deaf) as one:
            found.append(one.why)
    assert any("from torch's" in why for why in found)


def test_only_the_known_failure_has_the_known_reason() -> None:
    def fails(_: Side) -> None:
        raise ValueError("something else")

    side = BY_NAME["fast"]
    case = Case(project="a", test="b", case="c", run=fails, known=("no error", "taken"))
    assert not outcome(case, side).known
    known = replace(case, known=("something", "taken"))
    assert outcome(known, side).known
    assert outcome(known, side).why == "taken"
    assert not outcome(replace(case, run=lambda _: None), side).known


def test_the_page_counts_what_ended_otherwise() -> None:
    rows = [
        Outcome(project="p", test="t", case=case, side=side, why=why)
        for case, why in (("one", ""), ("two", "taken"))
        for side in ("reference", "fast")
    ]
    text = page(rows)
    assert "| p | 4 | 2 | 2 |" in text
    assert "| t | two | taken | reference and fast |" in text
    assert "| t | one |" not in text
    assert {"| torch |", "| DeepSpeed |", "| apex |"} <= {
        line[: line.index("|", 2) + 1] for line in PAGE.read_text().splitlines() if line[:2] == "| "
    }
