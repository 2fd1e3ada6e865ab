"""Tensors and one flat buffer: order, aligned slots, padding.

Tensor i starts at the next multiple of `slot` elements after the end of tensor i - 1. Slots of 16
elements keep every tensor on the 16-byte addresses that kernels like best.
"""

from collections.abc import Sequence

from torch import Tensor

from twinstep.contract.tensors import FLOATS
from twinstep.fast.checks import require_tensor
from twinstep.fast.kernels import pack as kernels


def require_room(where: str, flat: Sequence[Tensor], tensors: Sequence[Tensor], slot: int) -> None:
    """Require one flat buffer that holds all tensors, and one dtype on both sides."""
    if len(flat) != 1:
        raise ValueError(f"flat has {len(flat)} tensors, but should have 1 [{where}]")
    if slot < 1:
        raise ValueError(f"slot={slot}, but should be at least 1 element [{where}]")
    buffer = flat[0]
    require_tensor(where, "flat[0]", buffer, FLOATS, buffer)
    for index, tensor in enumerate(tensors):
        require_tensor(where, f"tensors[{index}]", tensor, (buffer.dtype,), buffer)
    _, end = kernels.offsets_of(tensors, slot)
    if buffer.numel() < end:
        raise ValueError(
            f"flat[0] has {buffer.numel()} elements, but should have at least {end} for "
            f"{len(tensors)} tensors in slots of {slot} [{where}]"
        )


def flatten_(tensors: Sequence[Tensor], flat: Sequence[Tensor], *, slot: int) -> None:
    """Copy tensors into the flat buffer; every element that belongs to none becomes +0.

    Args:
        tensors: of one dtype (fp32, fp16 or bf16), contiguous.
        flat: a list of one contiguous buffer of that dtype; written in full.
        slot: elements that tensors start on a multiple of.

    Raises:
        TypeError: dtypes differ.
        ValueError: the buffer is too small, devices differ, or a tensor is not contiguous.
    """
    require_room("flatten_", flat, tensors, slot)
    kernels.flatten_(tensors, flat, slot=slot)


def unflatten_(flat: Sequence[Tensor], tensors: Sequence[Tensor], *, slot: int) -> None:
    """Copy the flat buffer back into tensors; arguments and errors as in `flatten_`."""
    require_room("unflatten_", flat, tensors, slot)
    kernels.unflatten_(flat, tensors, slot=slot)
