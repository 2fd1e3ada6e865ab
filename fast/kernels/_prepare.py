"""The launch that advances the step counters and forms the coefficients of a step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from twinstep.fast.kernels._arith import HEADER, LANES
from twinstep.fast.runtime.compiled import Jitted
from twinstep.fast.runtime.dispatch import cdiv, launch
from twinstep.fast.runtime.tables import TableCache, address_table


def prepared(
    kernel: Jitted,
    steps: Sequence[Tensor],
    controls: Sequence[Tensor],
    cache: TableCache,
    *,
    width: int = 2,
    **options: bool,
) -> Tensor:
    """Run a preparing kernel over all step counters; return the coefficient block it wrote.

    `width`: numbers in the block for each counter, after the header.
    """
    near = controls[0]
    size = HEADER.value + width * len(steps)
    coefficients = torch.empty(size, dtype=torch.float32, device=near.device)
    is_table = len(steps) > 1
    counters = address_table(steps, cache).data if is_table else (*steps, coefficients)[0]
    launch(
        kernel,
        cdiv(len(steps), LANES.value),
        near,
        (counters, coefficients, *controls, len(steps)),
        reaches=[steps],
        IS_TABLE=is_table,
        **options,
    )
    return coefficients
