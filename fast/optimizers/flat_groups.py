"""Flat groups: one fp32 master for each parameter group, and model weights in one buffer per dtype.

Everything lies end to end without gaps, in the order of the group; parameters become views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from twinstep.contract.tensors import check_param


@dataclass(frozen=True, eq=False)
class FlatGroup:
    """One parameter group.

    Attributes:
        params: what is trained, in order; views of the buffers.
        buffers: the model weights, one 1-D buffer for each dtype.
        master: fp32, 1-D; the only parameter of the group inside.
    """

    params: list[Tensor]
    buffers: list[Tensor]
    master: Tensor

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """Return the part of each parameter in a tensor laid out like the master, as views."""
        return list(torch.split(flat.detach(), [param.numel() for param in self.params]))

    def lists(self, flat: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the pieces of tensors laid out like the master, and the model weights."""
        return [*map(self.pieces, flat), [param.detach() for param in self.params]]

    def copy_masters_to_model(self) -> None:
        """Write the master into the model weights, each rounded once."""
        for param, piece in zip(self.params, self.pieces(self.master), strict=True):
            param.detach().view(-1).copy_(piece)

    def copy_model_to_masters(self) -> None:
        """Write the model weights into the master."""
        for param, piece in zip(self.params, self.pieces(self.master), strict=True):
            piece.copy_(param.detach().reshape(-1))


def flat_group(params: Sequence[Tensor], where: str) -> FlatGroup:
    """Move a group's parameters into buffers; they keep their values, and frozen ones their place.

    Args:
        params: fp16, bf16 or fp32, on one device; requires_grad False means frozen.
        where: the class, for messages.

    Raises:
        ValueError: a dtype is none of these, or a parameter overlaps itself.
    """
    for index, param in enumerate(params):
        check_param(param, f"parameter {index}, {where}")
    trained = [param for param in params if param.requires_grad]
    device = params[0].device if len(params) else torch.device("cpu")
    count = sum(param.numel() for param in trained)
    master = torch.empty(count, dtype=torch.float32, device=device)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for param in trained:
        by_dtype.setdefault(param.dtype, []).append(param)
    group = FlatGroup(trained, [_moved(alike) for alike in by_dtype.values()], master)
    group.copy_model_to_masters()
    master.requires_grad_()
    return group


def _moved(params: Sequence[Tensor]) -> Tensor:
    sizes = [param.numel() for param in params]
    flat = torch.empty(sum(sizes), dtype=params[0].dtype, device=params[0].device)
    for param, end in zip(params, accumulate(sizes), strict=True):
        place = flat[end - param.numel() : end].view(param.shape)
        param.data = place.copy_(param.detach())
    return flat
