"""Flat groups: all parameters of a group end to end in one master, and in one buffer per dtype.

    master   fp32, 1-D, every parameter in order, no gaps
    buffers  one per dtype of the group, 1-D, in the order in which the dtypes appear; the
             parameters are views into them

A group of one dtype therefore has one buffer with the layout of its master.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinstep.contract.tensors import check_param
from twinstep.reference.arithmetic import fp32


@dataclass(frozen=True, eq=False)
class FlatGroup:
    """One parameter group.

    Attributes:
        params: what is trained, in order.
        buffers: the model weights, one flat buffer per dtype.
        master: the fp32 weights that the wrapped optimizer sees as its only parameter.
    """

    params: list[Tensor]
    buffers: list[Tensor]
    master: Tensor

    def slices(self) -> Iterator[tuple[Tensor, slice]]:
        """Each parameter with its place in the master."""
        start = 0
        for param in self.params:
            yield param, slice(start, start + param.numel())
            start += param.numel()


def flat_group(params: Sequence[Tensor], where: str) -> FlatGroup:
    """Lay out a group; the parameters become views of the new buffers and keep their values.

    Args:
        params: fp16, bf16 or fp32; frozen ones (requires_grad False) are left out and left alone.
        where: the class, for messages.

    Raises:
        ValueError: a dtype is none of these, or elements of a parameter share memory.
    """
    trained = [param for param in params if param.requires_grad]
    for index, param in enumerate(params):
        check_param(param, f"parameter {index}, {where}")
    pieces = [fp32(param.detach()).reshape(-1) for param in trained]
    master = (torch.cat(pieces) if pieces else torch.zeros(0)).requires_grad_()
    dtypes = list(dict.fromkeys(param.dtype for param in trained))
    buffers = [_buffer([p for p in trained if p.dtype is dtype]) for dtype in dtypes]
    return FlatGroup(params=trained, buffers=buffers, master=master)


def _buffer(params: Sequence[Tensor]) -> Tensor:
    """Move the parameters into one buffer."""
    buffer = torch.cat([param.detach().reshape(-1) for param in params])
    start = 0
    for param in params:
        param.data = buffer[start : start + param.numel()].view(param.shape)
        start += param.numel()
    return buffer


def flat_gradient(group: FlatGroup) -> Tensor:
    """Gradients in the layout of the master, fp32; zeros where a parameter has none."""
    flat = torch.zeros_like(group.master)
    for param, place in group.slices():
        if param.grad is not None:
            flat[place] = fp32(param.grad).reshape(-1)
    return flat


def copy_masters_to_model(group: FlatGroup) -> None:
    """Write the masters into the model weights, each rounded once."""
    for param, place in group.slices():
        param.detach().copy_(group.master.detach()[place].view(param.shape))


def copy_model_to_masters(group: FlatGroup) -> None:
    """Write the model weights into the masters."""
    for param, place in group.slices():
        group.master.detach()[place] = fp32(param.detach()).reshape(-1)
