"""Offload of ZeRO: masters, state and reduced gradients in the memory of the CPU.

    gradients   this rank's part of a bucket comes in the dtype of the wire, and is added up there
    norm        limbs of the sums there, 256 bytes of which go to the device
    decision    on the device, as without offload: skip, factor, loss scale
    update      there, in one pass, as soon as the host has read the factor
    weights     go back to the device in 16 bits

The norm is taken where the sums are: on the device it would take 4 bytes for each element once
more. Only what is sent is in pinned memory. On a GPU the host waits for gradients of the bucket
before the last one, and for the decision; not yet run on a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from twinstep.contract.zero import OffloadConfig, offloads
from twinstep.fast.kernels._limbs import NONFINITE
from twinstep.fast.kernels.cpu.accumulate import accumulate_
from twinstep.fast.kernels.cpu.adam import named, update_adam
from twinstep.fast.kernels.cpu.library import library
from twinstep.fast.kernels.cpu.reduce import add_squares
from twinstep.fast.kernels.reduce import new_limbs
from twinstep.fast.optimizers.fused_adam import FusedAdam
from twinstep.fast.optimizers.fused_lamb import FusedLamb

CPU = torch.device("cpu")
ROOMS = 2  # buckets on their way from the device


class Offload:
    """The copies between a device and the CPU, and the kernels there.

    Args:
        device: of the model.
        pins: use pinned memory for what is copied to and from a GPU.

    Raises:
        RuntimeError: there is no compiler for the kernels.
    """

    def __init__(self, device: torch.device, *, pins: bool) -> None:
        library()
        self._apart = device.type != "cpu"
        self._pins = pins and device.type == "cuda"
        self._coming: deque[tuple[Tensor, Tensor, torch.cuda.Event]] = deque()
        self._rooms: dict[object, Tensor] = {}
        self._turn = 0

    def buffers(self) -> list[Tensor]:
        """Buffers of copies that have been made; they are kept."""
        return list(self._rooms.values())

    def _room(self, key: object, like: Tensor) -> Tensor:
        """Memory of the CPU for as many elements, kept by a key."""
        room = self._rooms.get((key, like.dtype))
        if room is None or room.numel() < like.numel():
            room = torch.empty(like.numel(), dtype=like.dtype, pin_memory=self._pins)
            self._rooms[key, like.dtype] = room
        return room[: like.numel()]

    def add(self, sums: Tensor, received: Tensor) -> None:
        """Add gradients from the device to sums here, at the latest in `settle`."""
        if not self._apart:
            accumulate_([sums], [received])
            return
        if len(self._coming) == ROOMS:
            self._add_first()
        self._turn = (self._turn + 1) % ROOMS
        room = self._room(self._turn, received)
        room.copy_(received, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(received.device))
        self._coming.append((sums, room, arrived))

    def _add_first(self) -> None:
        sums, room, arrived = self._coming.popleft()
        arrived.synchronize()
        accumulate_([sums], [room])

    def settle(self) -> None:
        """Add what is still on its way."""
        while self._coming:
            self._add_first()

    def update(
        self,
        lists: Sequence[Tensor],
        weights: Tensor,
        step: Tensor,
        hyper: Sequence[float],
        *,
        bias_correction: bool,
        decoupled: bool,
    ) -> None:
        """Update a partition and send its weights to the device.

        Args:
            lists: master, sums of gradients, both moments.
            weights: this rank's part of the model's, on the device; written.
            step: completed steps; written.
            hyper: in the order of `fast.kernels.cpu.adam.HYPER`.
            bias_correction: False uses 1 for both corrections.
            decoupled: AdamW, not Adam.
        """
        copy = self._room(weights.data_ptr(), weights) if self._apart else weights
        update_adam(
            named(*([tensor.detach()] for tensor in (*lists, copy))),
            [step],
            hyper,
            bias_correction=bias_correction,
            decoupled=decoupled,
        )
        if self._apart:
            weights.copy_(copy, non_blocking=True)


def offload_of(config: OffloadConfig | None, device: torch.device) -> Offload | None:
    """The offload that a config asks for; None without one.

    Raises:
        ValueError: the config names another device than the CPU.
        RuntimeError: there is no compiler for the kernels.
    """
    pins = bool(getattr(config, "pin_memory", False))
    return Offload(device, pins=pins) if offloads(config) else None


def require_updatable(inner: object, fused: object) -> None:
    """Require an inner optimizer that the CPU has a kernel for, or one that needs none of ours.

    Args:
        inner: the optimizer.
        fused: the same if kernels can do all of its step, else None.

    Raises:
        RuntimeError: its step would launch Triton kernels.
    """
    if isinstance(inner, FusedAdam | FusedLamb) and not isinstance(fused, FusedAdam):
        raise RuntimeError(
            f"the inner optimizer is {type(inner).__name__}, but should be FusedAdam without hooks "
            "or one of torch: nothing else steps offloaded masters [ZeroOptimizer]"
        )


def enter_squares(counted: Sequence[Tensor], uncounted: Sequence[Tensor], limbs: Tensor) -> None:
    """Enter gradients on the CPU into limbs on the device; of some, only what is not finite."""
    own, rest = new_limbs(CPU), new_limbs(CPU)
    add_squares(counted, own)
    add_squares(uncounted, rest)
    own[NONFINITE.value] += rest[NONFINITE.value]
    limbs.copy_(own)
