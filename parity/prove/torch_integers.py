"""Integers of torch on names: arithmetic, logic, shifts, and other sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from twinstep.parity.prove.torch_forms import Naming
from twinstep.parity.prove.torch_rules import INTEGER
from twinstep.replay.dtypes import Array

INTEGERS = (torch.int16, torch.int32, torch.int64)


def integer(mode: Naming, word: str, pair: Sequence[Array], right: object, target: Tensor) -> Array:
    """Numbers of an operation on integers.

    Args:
        mode: gives numbers to expressions.
        word: a key of `torch_rules.INTEGER`.
        pair: numbers of the operands in the type of the result.
        right: the second operand itself; of a shift a plain number.
        target: the result.

    Raises:
        NotNamed: a shift by what is no plain number of bits.
    """
    bits = 8 * target.element_size()
    op = INTEGER[word].format(bits)
    if op.startswith("sh"):
        if not isinstance(right, int) or not 0 <= right < bits:
            raise mode.refusal(word)
        pair = [pair[0], np.full(pair[0].shape, mode.session.table.const(right, 2))]
    return mode.each(op, pair, bits // 16)


def resized(mode: Naming, numbers: Array, source: int, target: int) -> Array:
    """Numbers of integers in another size in bytes: with more signs, or cut."""
    if target > source:
        return mode.each(f"cvt.s{8 * target}.s{8 * source}", [numbers], target // 2)
    table, found = mode.session.table, np.full(numbers.shape, -1, np.int64)
    some = numbers >= 0
    found[some] = table.values(table.codes(numbers[some], source // 2)[..., : target // 2])
    return found
