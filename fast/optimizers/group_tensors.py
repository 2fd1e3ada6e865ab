"""Tensors of a parameter group, as kernels take them."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from twinstep.fast.runtime.lists import FixedTensors


@dataclass(frozen=True, kw_only=True)
class GroupTensors:
    """The tensors of one group.

    Attributes:
        lists: masters, gradients, first and second moments, model weights; contiguous.
        steps: counters of completed steps.
        bias_correction: of the group.
        shared: the tensors are pieces of one master with one counter.
    """

    lists: Sequence[Sequence[Tensor]]
    steps: Sequence[Tensor]
    bias_correction: bool
    shared: bool = False

    def key(self) -> list[object]:
        """Objects that are the same for as long as nothing but gradients is elsewhere."""
        masters, _, *others = self.lists
        steps = [self.steps] if isinstance(self.steps, FixedTensors) else self.steps
        return [masters, *others, *steps, self.bias_correction, self.shared]
