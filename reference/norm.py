"""The L2 norm of a list of tensors: an exact sum of squares, rounded once.

    S    = sum of x^2 over every element, as a real number, rounded once to float64
    norm = fp32(sqrt(S))

The sum is exact, so that neither the order of tensors nor how they are split can matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from twinstep.reference.arithmetic import fp32, fp64


def l2_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Root of the exact sum of squares of all elements; fp32, shape ().

    Args:
        tensors: fp32, fp16 or bf16, any shapes. Any NaN gives NaN, otherwise any infinity gives
            +inf; a norm above the largest fp32 number gives +inf; no elements give 0.0.
    """
    return fp32(root_of_squares(tensors))


def root_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The norm in float64: the real sum is rounded once, and its root once more.

    No tensor operation forms the sum, so tensors of other types may take over the whole function.
    """
    if has_torch_function(tensors):
        root: Tensor = handle_torch_function(root_of_squares, tensors, tensors)
        return root
    # A square of an fp32 number is exact in float64.
    squares = elements(fp64(tensor).square() for tensor in tensors)
    return torch.tensor(math.sqrt(math.fsum(squares)), dtype=torch.float64)


def elements(tensors: Iterable[Tensor]) -> Iterator[float]:
    """All elements, one after the other."""
    return chain.from_iterable(fp64(tensor).reshape(-1).tolist() for tensor in tensors)
