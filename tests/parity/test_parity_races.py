"""Races are a law of their own; kernels that only a GPU can reject are right everywhere else."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from twinstep.parity.operations.table import operation_named
from twinstep.parity.proof.corpus import Entry, Variant, harmless
from twinstep.parity.proof.corpus.judged import absent, judged
from twinstep.parity.proof.corpus.wrong_by_device import SHELF as ON_A_GPU
from twinstep.parity.proof.corpus.wrong_by_race import SHELF
from twinstep.parity.proof.mutate.judging import QUICK, some, verdict_on
from twinstep.parity.proof.mutate.verdict import End, Kind, Subject
from twinstep.parity.records.ledger import Status
from twinstep.parity.runner.recipes import Effort

EFFORT = Effort(examples=8, shrink_seconds=1.0, repros="unused")
TWINS = {
    "counter_advanced_while_others_read_it": "triton_counter_advanced_by_the_host",
    "counter_advanced_behind_a_relaxed_ticket": "triton_counter_advanced_by_the_last_program",
    "flag_cleared_while_others_raise_it": "triton_overflows_counted",
    "partial_sums_read_without_acquiring_them": "triton_last_program_adds_up",
    "partial_sums_read_without_a_second_fence": "triton_last_program_behind_fences",
    "lock_given_back_before_all_have_stored": "triton_sums_under_a_lock",
    "lock_of_one_block": "triton_sums_under_a_lock",
    "tickets_reset_while_others_still_ask": "triton_tiles_by_tickets",
    "partial_sums_added_by_float_atomics": "triton_two_sums_by_float_atomics",
    "partial_sums_added_by_swaps": "triton_two_sums_by_swaps",
    "root_of_a_total_that_others_add_to": "triton_root_by_the_last_program",
    "root_of_a_total_read_by_an_atomic": "triton_root_by_the_last_program",
    "partial_sums_of_a_stream_not_awaited": "triton_norm_on_two_streams",
    "gradients_read_on_a_stream_that_does_not_wait": "triton_norm_on_two_streams",
    "new_stream_left_current": "triton_norm_on_two_streams",
}


# Every access has its order, and the result is wrong in some orders of the blocks.
BY_ORDER = (
    "tickets_reset_while_others_still_ask",
    "partial_sums_added_by_float_atomics",
    "partial_sums_added_by_swaps",
)
BY_STREAM = {
    "partial_sums_of_a_stream_not_awaited": "root_kernel and kernel squares_kernel both touch",
    "gradients_read_on_a_stream_that_does_not_wait": "and the caller's earlier work both touch",
    "new_stream_left_current": "The launcher found stream 0 and leaves stream",
}


def twin(entry: Entry) -> Variant:
    return next(variant for variant in harmless() if variant.name == TWINS[entry.name])


def test_every_kernel_that_races_has_a_twin_that_does_not() -> None:
    assert {entry.name for entry in SHELF} == set(TWINS)


@pytest.mark.parametrize("entry", SHELF, ids=lambda entry: entry.name)
def test_a_race_is_named_with_lines_and_tensor_and_its_twin_has_none(entry: Entry) -> None:
    (cell,) = judged(entry, laws=("race_free",), effort=EFFORT).with_status(Status.FAILED)
    other = judged(twin(entry), laws=("race_free",), effort=EFFORT)
    assert len(other.with_status(Status.PASSED)) == 1, str(other.with_status(Status.FAILED))
    assert not cell.repro
    if entry.name in BY_ORDER:
        assert "depends on the order in which blocks run" in cell.failure
        return
    if entry.name in BY_STREAM:
        assert BY_STREAM[entry.name] in cell.failure
        return
    line = r"\S*racing_kernels\.py:\d+"
    found = re.search(
        rf"of \d+ bytes of (\S+) without order after a \w+ at {line} by", cell.failure
    )
    assert found is not None
    assert found[1] in ("step/steps[0]", "flag", "partial", "sums", "lock", "total", "norm")
    assert len(re.findall(line, cell.failure)) == 2


def test_values_do_not_show_a_race() -> None:
    ledger = judged(SHELF[1], laws=("value", "repeat", "non_finite"), effort=EFFORT)
    assert len(ledger.with_status(Status.PASSED)) == 3


@pytest.mark.parametrize("entry", ON_A_GPU, ids=lambda entry: entry.name)
def test_what_only_a_graph_shows_is_right_on_the_cpu(entry: Entry) -> None:
    ledger = judged(replace(entry, engines=("cpu",)), effort=EFFORT)
    assert not ledger.with_status(Status.FAILED)
    assert {cell.key.law for cell in ledger.with_status(Status.PASSED)} >= {"value", "no_host_read"}


@pytest.mark.parametrize("entry", ON_A_GPU, ids=lambda entry: entry.name)
def test_without_a_gpu_such_a_kernel_counts_for_nothing(entry: Entry) -> None:
    if not absent(entry):
        pytest.skip("there is a GPU here")
    found = verdict_on(Subject(kind=Kind.WRONG, name=entry.name), QUICK)
    assert (found.end, found.reason) == (End.ABSENT, "no CUDA GPU here")
    assert not found.kept


def test_few_combinations_are_first_fullest_and_last() -> None:
    assert some(operation_named("sgd_step", "test").combinations) == ("fp32", "fp16", "mixed")
    assert some(operation_named("clip_factor", "test").combinations) == ("scalar",)
