"""Tensors of a parameter group, as kernels take them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from twinstep.fast.runtime.strides import are_contiguous


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupTensors:
    """The tensors of one group; compared by identity.

    Attributes:
        lists: masters, gradients, first and second moments, model weights; contiguous where kernels
            take them.
        steps: counters of completed steps.
        bias_correction: of the group.
        shared: the tensors are pieces of one master with one counter.
    """

    lists: Sequence[Sequence[Tensor]]
    steps: Sequence[Tensor]
    bias_correction: bool
    shared: bool = False

    @cached_property
    def contiguous(self) -> bool:
        """True if all tensors of the lists are contiguous."""
        return are_contiguous(self.lists)
