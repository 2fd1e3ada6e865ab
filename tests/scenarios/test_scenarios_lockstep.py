"""Lockstep can say yes and no: equal sides pass, one wrong bit anywhere is named."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from twinstep.scenarios import calls, lockstep, train
from twinstep.scenarios.calls import Answer, Call, Written, reference_answer
from twinstep.scenarios.lockstep import differences, tensor_difference
from twinstep.scenarios.model import Shape
from twinstep.scenarios.plan import Plan
from twinstep.scenarios.trace import first_difference
from twinstep.scenarios.trainers import OperationTrainer

SMALL = Shape(context=16, width=10, layers=1)
BF16 = Plan(dtype="bf16", steps=1, shape=SMALL)
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
OPERATIONS = {
    *("adamw_step", "cast_copy", "clip_factor", "flatten"),
    *("global_norm", "mixed_step", "unflatten", "unscale"),
}
STATE = list(OperationTrainer(BF16).state.entries)


def first_tensor(written: Written, name: str) -> Tensor:
    value = written[name]
    return value[0] if isinstance(value, list) else value


def with_one_wrong_bit(operation: str, name: str, *, tensors: int | None = None) -> Answer:
    """A side that is right but for the lowest bit of one element of one argument."""

    def answer(call: Call) -> Written:
        written = reference_answer(call)
        fits = tensors is None or len(call.lists.get("params", ())) == tensors
        if call.operation == operation and fits:
            target = first_tensor(written, name)
            target.view(-1).view(INTEGERS[target.element_size()])[-1] ^= 1
        return written

    return answer


def test_equal_sides_pass_on_every_operation() -> None:
    report = lockstep.run(Plan(steps=3), fast=reference_answer)
    assert report.differences == []
    assert report.operations == OPERATIONS
    assert len(report.trace.records) == 3
    assert report.compared == 3 * 3_301_580


def test_micro_batches_add_their_gradients_on_both_sides() -> None:
    plan = Plan(dtype="fp16", steps=1, accumulate=2, shape=SMALL)
    assert "accumulate" in lockstep.run(plan, fast=reference_answer).operations
    wrong = with_one_wrong_bit("accumulate", "accumulators")
    assert lockstep.run(plan, fast=wrong).differences


@pytest.mark.parametrize("name", STATE)
def test_one_wrong_bit_in_a_whole_step_is_caught(name: str) -> None:
    report = lockstep.run(BF16, fast=with_one_wrong_bit("mixed_step", name))
    (in_lists, in_flat) = report.differences
    for found, layout in ((in_lists, "list"), (in_flat, "flat")):
        assert found.startswith(f"step 1 mixed_step[{layout}] {name}")
        assert " differs from the reference, 1 of " in found


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        ("global_norm", "norm"),
        ("global_norm", "found_inf"),
        ("clip_factor", "factor"),
        ("adamw_step", "params"),
        ("adamw_step", "steps"),
        ("unscale", "grads"),
        ("cast_copy", "copies"),
        ("flatten", "flat"),
        ("unflatten", "tensors"),
    ],
)
def test_one_wrong_bit_in_a_part_is_caught(operation: str, name: str) -> None:
    report = lockstep.run(BF16, fast=with_one_wrong_bit(operation, name))
    (found,) = report.differences
    assert found.startswith(f"step 1 {operation}[list] {name}")


def test_a_difference_in_the_flat_layout_alone_is_caught() -> None:
    wrong = with_one_wrong_bit("mixed_step", "exp_avgs", tensors=1)
    (found,) = lockstep.run(BF16, fast=wrong).differences
    assert found.startswith("step 1 mixed_step[flat] exp_avgs[0][4159] differs")
    assert lockstep.run(BF16, fast=wrong, layouts=("list",)).differences == []


def test_a_write_into_the_gap_of_a_flat_buffer_is_caught() -> None:
    def answer(call: Call) -> Written:
        written = reference_answer(call)
        if call.operation == "mixed_step" and len(call.lists["params"]) == 1:
            first_tensor(written, "params")[-1] = -0.0
        return written

    (found,) = lockstep.run(BF16, fast=answer).differences
    assert "got      -0  0x80000000" in found


def test_counting_a_skipped_step_is_caught() -> None:
    def answer(call: Call) -> Written:
        written = reference_answer(call)
        if call.operation == "mixed_step" and bool(calls.scalar(written, "found_inf")):
            written["steps"] = [step + 1 for step in calls.tensors(written, "steps")]
        return written

    report = lockstep.run(Plan(steps=4, shape=SMALL), fast=answer)
    assert {found.split()[3].split("[")[0] for found in report.differences} == {"steps"}
    assert report.trace.records[-1].step == 1


def test_a_difference_names_step_parameter_index_and_bits() -> None:
    report = lockstep.run(BF16, fast=with_one_wrong_bit("mixed_step", "params"))
    headline, got, want, distance = report.differences[0].splitlines()
    assert headline == (
        "step 1 mixed_step[list] params[embed][2559] differs from the reference, "
        "1 of 2560 elements do"
    )
    assert got.split()[-1].startswith("0x")
    assert got.split()[-1] != want.split()[-1]
    assert distance == "  distance 1 ULP"


def test_the_run_stops_at_the_first_step_that_differs() -> None:
    right: list[str] = []

    def answer(call: Call) -> Written:
        right.append(call.operation)
        late = right.count("clip_factor") == 3
        return (with_one_wrong_bit("clip_factor", "factor") if late else reference_answer)(call)

    report = lockstep.run(Plan(dtype="fp32", steps=9, shape=SMALL), fast=answer)
    assert [record.step for record in report.trace.records] == [1, 2, 3]
    assert all(found.startswith("step 3 ") for found in report.differences)


def test_the_run_goes_on_from_the_reference() -> None:
    wrong = with_one_wrong_bit("mixed_step", "params")
    ours = lockstep.run(BF16, fast=wrong).trace
    theirs = train.run("reference", BF16)
    assert first_difference(ours, theirs) is None
    assert ours.held_out == theirs.held_out


def test_flat_state_has_slots_of_16_elements_and_zero_gaps() -> None:
    state = OperationTrainer(BF16).state
    for master in state.params:
        master.fill_(1.0)
    (buffer,) = lockstep.flat_state(state).params
    assert buffer.numel() % 16 == 0
    assert int(buffer.sum()) == sum(master.numel() for master in state.params)
    gaps = buffer[buffer != 1.0]
    assert gaps.numel() == buffer.numel() - int(buffer.sum()) > 0
    assert not torch.signbit(gaps).any()
    assert lockstep.flat([]) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_comparison_rejects_a_single_wrong_bit(dtype: torch.dtype) -> None:
    ours = torch.linspace(-1.0, 1.0, 33, dtype=torch.float64).to(dtype)
    theirs = ours.clone()
    theirs.view(INTEGERS[dtype.itemsize])[20] ^= 1
    found = tensor_difference("w", ours, theirs)
    assert found.startswith("w[20] differs from the reference, 1 of 33 elements do\n")
    assert "1 ULP" in found


def test_comparison_names_both_bit_patterns() -> None:
    found = tensor_difference("w", torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]))
    assert found.splitlines() == [
        "w[1] differs from the reference, 1 of 2 elements do",
        "  got      -0  0x80000000",
        "  want     0  0x00000000",
        "  distance the sign of zero",
    ]


def test_comparison_takes_any_nan_for_nan_and_no_number() -> None:
    quiet = torch.tensor([math.nan])
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert tensor_difference("w", quiet, other) == ""
    assert tensor_difference("w", quiet, torch.tensor([math.inf])) != ""


def test_comparison_rejects_a_wrong_counter() -> None:
    assert "off by 1" in tensor_difference("steps", torch.tensor(3), torch.tensor(4))


@pytest.mark.parametrize("theirs", [torch.zeros(3), torch.zeros(2, dtype=torch.float16)], ids=str)
def test_comparison_rejects_another_size_or_dtype(theirs: Tensor) -> None:
    found = tensor_difference("w", torch.zeros(2), theirs)
    assert "but should have 2 torch.float32" in found


@pytest.mark.parametrize("tensor", [torch.arange(5.0), torch.empty(0)], ids=str)
def test_comparison_accepts_equal_and_empty_tensors(tensor: Tensor) -> None:
    assert tensor_difference("w", tensor, tensor.clone()) == ""


def test_differences_of_a_list_carry_the_parameters_names() -> None:
    ours: Written = {"params": [torch.zeros(2), torch.zeros(3)], "norm": torch.tensor(1.0)}
    theirs: Written = {"params": [torch.zeros(2), torch.ones(3)], "norm": torch.tensor(1.0)}
    (found,) = differences("step 1", ours, theirs, ["embed", "bias"])
    assert found.startswith("step 1 params[bias][0] differs")


def test_a_missing_tensor_is_an_error_not_an_equal() -> None:
    with pytest.raises(ValueError, match="shorter"):
        differences("step 1", {"p": [torch.zeros(1)] * 2}, {"p": [torch.zeros(1)]}, [])
