"""Policies that `contract.compat.Compat` selects: the scale that divides, the count of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from twinstep.contract.compat import Compat
from twinstep.reference.loss_scale import (
    GrowthTest,
    grows_after_full_window,
    grows_with_full_window,
)
from twinstep.reference.scale_state import ScaleState


def state_to_unscale_with(compat: Compat, before: ScaleState, after: ScaleState) -> ScaleState:
    """The loss-scale state whose scale divides the gradients of this step (LS-1)."""
    return after if compat.unscale_with_updated_scale else before


def growth_test(compat: Compat) -> GrowthTest:
    """Which clean steps let the dynamic scale grow (LS-4)."""
    return grows_with_full_window if compat.growth_counts_this_step else grows_after_full_window


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
