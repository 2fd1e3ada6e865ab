"""Policies that `contract.compat.Compat` selects: the scale that divides, the count of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from twinstep.contract.compat import Compat


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Result of counting one step, one entry per parameter of a group that has a gradient.

    Attributes:
        used: number of this step, counted from 1, for the bias correction.
        stored: what each parameter's counter holds afterwards.
    """

    used: list[int]
    stored: list[int]


Counting = Callable[[Sequence[int], Sequence[torch.dtype]], Counts]


def counting(compat: Compat) -> Counting:
    """How `FusedAdam` counts the steps of a group (FA-1, FA-2)."""
    return count_shared if compat.shared_step_counter else count_each


def count_each(steps: Sequence[int], dtypes: Sequence[torch.dtype]) -> Counts:
    """Every parameter counts for itself."""
    del dtypes
    advanced = [step + 1 for step in steps]
    return Counts(used=advanced, stored=advanced)


def count_shared(steps: Sequence[int], dtypes: Sequence[torch.dtype]) -> Counts:
    """The last parameter counts for all, once for each dtype: fp16, then bf16, then fp32."""
    used, stored = list(steps), list(steps)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        members = [index for index, of in enumerate(dtypes) if of is dtype]
        if members:
            stored[-1] += 1
        for index in members:
            used[index] = stored[-1]
    return Counts(used=used, stored=stored)
