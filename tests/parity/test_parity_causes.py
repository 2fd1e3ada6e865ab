"""Known causes are named for the kernels that have them, and for no others.

The wrong kernels of the corpus are written without any knowledge of the formulas that recognise
them.
"""

from __future__ import annotations

import pytest
import torch

from twinstep.parity.cases.case import Recipe
from twinstep.parity.cases.generate import generate
from twinstep.parity.operations.table import operation_named
from twinstep.parity.proof.corpus.corpus import corpus
from twinstep.parity.proof.corpus.entry import Entry
from twinstep.parity.proof.corpus.judged import judged
from twinstep.parity.records.ledger import Status
from twinstep.parity.runner.causes.evidence import Evidence
from twinstep.parity.runner.causes.known import known_cause
from twinstep.parity.runner.causes.marks import KEPT_IN_FP32, WRAPS, index_cause
from twinstep.parity.runner.recipes import Effort

QUICK = Effort(examples=12, shrink_seconds=0.01, repros=None)
L2, DECOUPLED = "added to the gradient (L2)", "decoupled and times lr"
OF_KERNELS = {
    ("adamw_step", "eps_inside_the_square_root"): "eps is added under the root",
    ("adamw_step", "eps_before_the_bias_correction"): "eps is added before the bias correction",
    ("adamw_step", "weight_decay_coupled"): f"weight decay is {L2}, but should be {DECOUPLED}",
    ("adam_step", "weight_decay_decoupled"): f"weight decay is {DECOUPLED}, but should be {L2}",
    ("adamw_step", "weight_decay_without_the_learning_rate"): "weight decay is not multiplied",
    ("adamw_step", "one_minus_beta_in_fp32"): "1 - beta is formed in fp32",
    ("adamw_step", "bias_correction_in_fp32"): "beta^t is formed in fp32",
    ("adamw_step", "bias_correction_missing"): "bias_correction is ignored: it is taken for False",
    ("adamw_step", "bias_correction_of_the_step_before"): "the bias correction takes the step be",
    ("adamw_step", "gradient_divided_by_the_factor"): "divides by factor, but should multiply",
    ("adamw_step", "gradient_unscaled_twice"): "factor is applied twice",
    ("adamw_step", "betas_swapped"): "beta1 and beta2 are exchanged",
    ("adamw_step", "copies_of_the_weights_before"): "copies are made of the weights before",
    ("adamw_step", "copies_truncated"): "low-precision results are cut off",
    ("adamw_step", "overflow_ignored"): "found_inf is ignored",
    ("adamw_step", "step_counted_on_a_skipped_step"): "a skipped step is counted in steps",
    ("cast_copy", "cast_truncates"): "low-precision results are cut off",
    ("unscale", "divided_by_inv_scale"): "divides by inv_scale, but should multiply",
    ("accumulate", "first_call_accumulates_twice"): "the operation is applied more than once",
    ("lamb_step", "lamb_eps_always_outside"): "eps_inside_sqrt is ignored",
}
# Faults near to a known one; the wrong name would send the reader astray.
NAMELESS = (
    ("unscale", "non_finite_gradients_zeroed"),
    ("unscale", "gradients_left_scaled_on_overflow"),
    ("unscale", "unscale_tail_skipped"),
    ("global_norm", "empty_list_leaves_the_norm"),
    ("global_norm", "norm_summed_in_list_order"),
    ("adamw_step", "copies_refreshed_on_a_skipped_step"),
    ("update_scale_dynamic", "overflow_not_remembered"),
)


def cause_of(operation: str, name: str) -> str:
    rows = (row for row in corpus() if (row.operation, row.name) == (operation, name))
    entry: Entry = next(rows)
    ledger = judged(entry, laws=(entry.law,), dtypes=entry.dtypes[:1], effort=QUICK)
    (cell,) = ledger.with_status(Status.FAILED)
    return cell.cause


@pytest.mark.parametrize(("operation", "name"), OF_KERNELS)
def test_the_known_mistake_of_a_kernel_is_named(operation: str, name: str) -> None:
    assert cause_of(operation, name).startswith(OF_KERNELS[operation, name])


@pytest.mark.parametrize(("operation", "name"), NAMELESS)
def test_a_mistake_that_only_looks_like_a_known_one_is_not_named(operation: str, name: str) -> None:
    assert cause_of(operation, name) == ""


def evidence(grads: list[torch.Tensor], norm: float) -> Evidence:
    recipe = Recipe(layout="list", sizes=tuple(grad.numel() for grad in grads), seed=1)
    case = generate(operation_named("global_norm", "test"), "fp16", recipe)
    found = {("norm", 0): torch.tensor(norm), ("found_inf", 0): torch.tensor(0.0)}
    return Evidence(case.with_lists({"grads": grads}), found, "bounded")


def test_a_norm_that_overflows_in_fp16_is_told_from_one_that_is_infinite_for_no_reason() -> None:
    large = evidence([torch.full((40,), 100.0, dtype=torch.float16)], torch.inf)
    cause = known_cause(large, lambda: ())
    assert cause is not None
    assert cause.says == "the sum of squares overflows in fp16"
    small = evidence([torch.full((4,), 10.0, dtype=torch.float16)], torch.inf)
    assert known_cause(small, lambda: ()) is None


def test_a_wild_step_count_is_not_taken_for_a_number_of_runs() -> None:
    operation = operation_named("adamw_step", "test")
    options = {row.name: row.choices[0] for row in operation.options}
    case = generate(operation, "fp32", Recipe(layout="list", sizes=(3,), options=options))
    got = {(name, 0): result[0].clone() for name, result in case.reference().items() if result}
    got["steps", 0] += 1 << 40
    got["params", 0] += 1.0
    assert known_cause(Evidence(case, got, "exact"), lambda: ()) is None


OUTSIDE = (
    "raises OutOfBounds: read of 4 bytes at address 0x7fc3, "
    "byte offset {} of p/params[0] ({} bytes)"
)


def test_an_address_that_a_wrapped_index_gives_is_told_from_any_other() -> None:
    size = 4 * 6_442_451_021
    wrapped = index_cause(OUTSIDE.format(-8_589_934_592, size))
    assert wrapped is not None
    assert wrapped.says == WRAPS
    wide = OUTSIDE.replace("4 bytes", "16 bytes")
    vector = index_cause(wide.format(-4_295_000_064, size))
    assert vector is not None
    assert vector.says == "32-bit index overflow: element 2^31 and beyond"
    assert index_cause(OUTSIDE.format(-4, 4 * 100)) is None
    assert index_cause(OUTSIDE.format(size, size)) is None
    assert index_cause("raises ValueError: no") is None


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        (("middle", "last"), WRAPS),
        (("last", "drawn"), WRAPS),
        (("middle", "last", "past 2**24"), KEPT_IN_FP32),
        (("first", "middle", "last"), ""),
        (("middle",), ""),
        ((), ""),
    ],
)
def test_wrong_places_of_a_large_tensor_tell_which_index_is_too_short(
    ends: tuple[str, ...], says: str
) -> None:
    cause = index_cause("", ends)
    assert ("" if cause is None else cause.says) == says
