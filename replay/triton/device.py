"""Names of the modelled GPU, and checks of them."""

from __future__ import annotations

import contextlib

import torch

INDEX = 1000
"""Index that replay's driver gives Triton for its device; no machine has a GPU of that number."""

DEVICE = torch.device("cuda", 0)


def on_gpu(device: object) -> bool | None:
    """True for the modelled GPU, False for the CPU, None for what is neither.

    Args:
        device: anything that torch takes for a device; also None, which names none.

    Raises:
        RuntimeError: it is another GPU.
    """
    if isinstance(device, int) and not isinstance(device, bool):
        device = torch.device("cuda", device)
    if not isinstance(device, str | torch.device):
        return None
    place = torch.device(device)
    if place.type == "cuda" and place.index not in (None, 0, INDEX):
        raise RuntimeError(f"CUDA error: invalid device ordinal: {place}, but there is one GPU")
    return {"cuda": True, "cpu": False}.get(place.type)


def checked(device: object = None) -> None:
    """Refuse what names another device than the modelled GPU, and is not None.

    Raises:
        ValueError: it does.
    """
    if device is not None and not isinstance(device, Device) and not on_gpu(device):
        raise ValueError(f"Expected a cuda device, but got: {device}")


class Device(contextlib.AbstractContextManager["Device"]):
    """`torch.cuda.device` and its relatives: the one GPU is always the current one."""

    def __init__(self, device: object = None) -> None:
        tensor = isinstance(device, torch.Tensor)
        checked(None if tensor or device in (-1, None) else device)
        self.idx = 0

    def __exit__(self, *_: object) -> None:
        """Leave it current."""
