"""Faults planted in the arithmetic of our kernels: none stays proved."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.proved_kernels import planted
from twinstep.parity.proof.mutate.copies import changed, kernel_of
from twinstep.parity.proof.mutate.sites import mutants
from twinstep.parity.prove.rows import prove_situation
from twinstep.parity.prove.situations import situations
from twinstep.parity.records.proof import NOT_PROVED, REFUTED

SAMPLE = {
    "adam_tile": ("c2 * g", "wd * p", "lr * u"),
    "sgd_tile": ("rest * g", "lr * d"),
    "accumulate_tile": ("a + g",),
    "store_adam_header": ("1.0 - beta2",),
}
"""Functions, and expressions in them."""
OPERATIONS = {
    "adam_tile": "adam_step",
    "sgd_tile": "sgd_step",
    "accumulate_tile": "accumulate",
    "store_adam_header": "adam_step",
}


@pytest.mark.parametrize(
    ("function", "before"), [(f, before) for f, rows in SAMPLE.items() for before in rows]
)
def test_a_fault_in_the_arithmetic_is_not_proved(
    function: str, before: str, tmp_path: Path
) -> None:
    mutant = planted(function, before)
    assert mutant is not None, [m.before for m in mutants().values() if m.function == function]
    with changed(mutant, tmp_path):
        kernel = kernel_of(OPERATIONS[function])
        first = next(situations(kernel, ["bf16"]))
        small = replace(first, sizes=(70,))
        verdict = prove_situation(small, 60.0)
    assert verdict.word in (REFUTED, NOT_PROVED), (mutant.name, verdict)


AT_OTHER_COUNTERS = (
    ("power, operator: left >> 1 -> left << 1", "adam_step", "steps = 4, 9007199254740992"),
    ("grows_now, comparison: clean > 0 -> clean >= 0", "update_scale_dynamic", "cur_iter = "),
    ("grows_now, constant: 0 -> 0 + 1 (2)", "update_scale_wrapper", "scale_window = 1"),
    ("dynamic_rule, condition: RAISE -> not (RAISE)", "update_scale_dynamic", "exhausted = "),
)


@pytest.mark.parametrize(("fault", "operation", "said"), AT_OTHER_COUNTERS)
def test_a_fault_at_other_counters_than_the_first_is_refuted(
    fault: str, operation: str, said: str, tmp_path: Path
) -> None:
    name = next(name for name in mutants() if name.endswith(fault))
    with changed(mutants()[name], tmp_path):
        known = situations(kernel_of(operation), ["bf16", "scalar"])
        subject = next(s for s in known if s.layout != "flat")
        sizes = (70, 37)[: len(subject.sizes)]
        verdict = prove_situation(replace(subject, sizes=sizes), 60.0)
    assert verdict.word == REFUTED
    assert said in verdict.detail
