"""Kernels wrong on a condition are never proved; right ones in another order are never refuted."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.helpers.conditional_kernels import MAGNITUDE, OUTSIDE, REORDERED, WRONG, step
from tests.helpers.proved_kernels import row
from twinstep.parity.prove import prove
from twinstep.parity.prove.rows import prove_situation
from twinstep.parity.prove.situations import Situation
from twinstep.parity.records.proof import NOT_PROVED, PROVED, REFUTED, Verdict
from twinstep.parity.registry.kernels import Kernel


def verdict_on(kernel: Kernel) -> Verdict:
    options = {"bias_correction": False}
    return prove_situation(Situation(kernel, "fp32", "flat", (1,), False, options), 60.0)


def test_the_kernel_without_a_fault_is_proved() -> None:
    assert verdict_on(row(step(), "cpu")).word == PROVED


@pytest.mark.parametrize("name", OUTSIDE)
def test_controls_have_only_the_values_of_the_contract(name: str) -> None:
    assert verdict_on(row(OUTSIDE[name], "cpu")).word == PROVED


def test_no_kernel_is_refuted_by_a_second_moment_below_zero() -> None:
    assert verdict_on(row(MAGNITUDE, "cpu")).word == NOT_PROVED


def test_a_kernel_that_is_wrong_on_a_condition_is_never_proved() -> None:
    assert len(WRONG) >= 20
    words: Counter[str] = Counter()
    for name, function in WRONG.items():
        verdict = verdict_on(row(function, "cpu"))
        words[verdict.word] += 1
        assert verdict.word in (REFUTED, NOT_PROVED), (name, verdict)
        if verdict.word == NOT_PROVED:
            assert "kernel:" in verdict.detail or "branch" in verdict.detail, (name, verdict)
    print(f"{len(WRONG)} kernels wrong on a condition: {dict(words)}")


def test_a_number_in_the_place_of_a_nan_is_no_rounding() -> None:
    kernel = replace(row(WRONG["NaN is zero"], "cpu"), arithmetic="bounded")
    assert verdict_on(kernel).word == REFUTED


def test_a_kernel_in_another_order_is_not_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    # Fewer runs with drawn values before the proof.
    monkeypatch.setattr(prove, "LOOKED_AT", 1)
    assert len(REORDERED) >= 20
    words: Counter[str] = Counter()
    for name, function in REORDERED.items():
        kernel = replace(row(function, "cpu"), arithmetic="bounded")
        verdict = verdict_on(kernel)
        words[verdict.word] += 1
        assert verdict.word == PROVED, (name, verdict)
    print(f"{len(REORDERED)} kernels in another order: {dict(words)}")
