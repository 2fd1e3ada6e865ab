"""The state of an optimizer that is given its masters: allocated, or stepped into as upstream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twinstep.reference.compat import Compat
from twinstep.reference.fused_adam import FusedAdam
from twinstep.reference.fused_lamb import FusedLamb


def initialize(optimizer: torch.optim.Optimizer, masters: Sequence[Tensor], compat: Compat) -> None:
    """Allocate the state of all masters.

    No value changes: moments are zero and counters are 0, as before a first step. An optimizer
    that is not ours allocates when it first steps, and is left alone. With
    `compat.step_at_construction` a whole step with zero gradients is taken instead (edge FP-1): it
    decays masters, and counters become 1.

    Args:
        optimizer: whose parameters are the masters.
        masters: written with the compat field alone.
        compat: see above.
    """
    if not compat.step_at_construction:
        if isinstance(optimizer, FusedAdam | FusedLamb):
            optimizer.initialize_states()
        return
    for master in masters:
        master.grad = torch.zeros_like(master)
    optimizer.step()
    for master in masters:
        master.grad = None
