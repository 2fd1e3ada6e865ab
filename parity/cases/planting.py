"""Values that are not finite, and other bit patterns, put into a case."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from twinstep.parity.cases.case import Case
from twinstep.parity.cases.formats import FORMATS, INTEGERS, non_finite_bits
from twinstep.parity.operations.operation import Operation, Role


def planted(case: Case, rng: np.random.Generator) -> Case:
    """Put one non-finite value into one element of one list that is read."""
    readable = [
        (argument.name, index)
        for argument in case.operation.lists
        if argument.role not in _never_planted(case.operation)
        for index, tensor in enumerate(case.lists[argument.name])
        if tensor.numel() and tensor.is_floating_point()
    ]
    if not readable:
        return case
    gradients = [row for row in readable if row[0] in case.operation.lists_of(Role.GRAD)]
    pool = gradients if gradients and rng.integers(0, 4) else readable
    name, index = pool[int(rng.integers(0, len(pool)))]
    place = int(rng.integers(0, case.lists[name][index].numel()))
    kinds = list(non_finite_bits(FORMATS[case.lists[name][index].dtype]))
    return plant(case, name, index, place, kinds[int(rng.integers(0, len(kinds)))])


def _never_planted(operation: Operation) -> tuple[Role, ...]:
    """Not weights beside gradients: a non-finite weight has lost the training already."""
    written = (Role.OUTPUT, Role.STEPS)
    return (*written, Role.PARAM) if operation.lists_of(Role.GRAD) else written


def plant(case: Case, name: str, index: int, place: int, kind: str) -> Case:
    """The case with `kind` (a name from `formats.non_finite_bits`) at one element."""
    tensor = case.lists[name][index]
    pattern = non_finite_bits(FORMATS[tensor.dtype])[kind]
    return replaced(case, name, index, with_bits(tensor, [place], pattern))


def replaced(case: Case, name: str, index: int, tensor: Tensor) -> Case:
    """The case with another tensor at one position."""
    tensors = list(case.lists[name])
    tensors[index] = tensor
    return case.with_lists({**case.lists, name: tensors})


def with_bits(tensor: Tensor, places: Sequence[int], pattern: int) -> Tensor:
    """A copy of the tensor with this bit pattern at these places."""
    new, signed = tensor.reshape(-1).clone(), INTEGERS[8 * tensor.itemsize]
    word = np.uint64(pattern).astype(f"u{tensor.itemsize}").view(f"i{tensor.itemsize}")
    new.view(signed)[list(places)] = torch.tensor(int(word), dtype=signed)
    return new.reshape(tensor.shape)
