"""The comparison can say no: one bit, one sign of zero, one element, one dtype."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from twinstep.scenarios.calls import Written
from twinstep.scenarios.difference import elements, tensor_difference, written_differences

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_comparison_rejects_a_single_wrong_bit(dtype: torch.dtype) -> None:
    ours = torch.linspace(-1.0, 1.0, 33, dtype=torch.float64).to(dtype)
    theirs = ours.clone()
    theirs.view(INTEGERS[dtype.itemsize])[20] ^= 1
    found = tensor_difference("w", ours, theirs)
    assert found is not None
    assert (found.index, found.count) == (20, 1)
    assert "1 ULP" in str(found)


def test_comparison_names_both_bit_patterns() -> None:
    found = tensor_difference("w", torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]))
    assert str(found).splitlines() == [
        "w[1] differs from the reference, 1 of 2 elements do",
        "  got      -0  0x80000000",
        "  want     0  0x00000000",
        "  distance the sign of zero",
    ]


def test_comparison_takes_any_nan_for_nan_and_no_number() -> None:
    quiet = torch.tensor([math.nan])
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert tensor_difference("w", quiet, other) is None
    assert tensor_difference("w", quiet, torch.tensor([math.inf])) is not None


def test_comparison_rejects_a_wrong_counter() -> None:
    found = tensor_difference("steps", torch.tensor(3), torch.tensor(4))
    assert found is not None
    assert "off by 1" in str(found)


@pytest.mark.parametrize("theirs", [torch.zeros(3), torch.zeros(2, dtype=torch.float16)], ids=str)
def test_comparison_rejects_another_size_or_dtype(theirs: Tensor) -> None:
    found = tensor_difference("w", torch.zeros(2), theirs)
    assert found is not None
    assert "but should have 2 torch.float32" in str(found)


def test_comparison_accepts_equal_and_empty_tensors() -> None:
    assert tensor_difference("w", torch.arange(5.0), torch.arange(5.0)) is None
    assert tensor_difference("w", torch.empty(0), torch.empty(0)) is None


def test_differences_of_a_list_carry_the_parameters_names() -> None:
    ours: Written = {"params": [torch.zeros(2), torch.zeros(3)], "norm": torch.tensor(1.0)}
    theirs: Written = {"params": [torch.zeros(2), torch.ones(3)], "norm": torch.tensor(1.0)}
    (found,) = written_differences("step 1", ours, theirs, ["embed", "bias"])
    assert found.where == "step 1 params[bias][0]"
    assert elements(ours) == 6


def test_a_missing_tensor_is_an_error_not_an_equal() -> None:
    with pytest.raises(ValueError, match="shorter"):
        written_differences("step 1", {"p": [torch.zeros(1)] * 2}, {"p": [torch.zeros(1)]})
