"""Offload of ZeRO: masters, state and reduced gradients in the memory of the CPU.

    gradients   this rank's part of a bucket comes in the dtype of the wire; those of a first
                micro-batch are held as they are, those of more are added up
    norm        limbs of what is there, 256 bytes of which go to the device
    decision    on the device, as without offload: skip, factor, loss scale
    update      there, in one pass, as soon as the host has read the factor
    weights     go back to the device in 16 bits

The norm is taken where the gradients are: sums would have to come back to the device. Only what is
sent is in pinned memory. On a GPU the host waits for the decision, and from the second micro-batch
on for gradients of the bucket before the last one; not yet run on a GPU.
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
from twinstep.fast.kernels.cpu.reduce import add_squares
from twinstep.fast.kernels.reduce import new_limbs
from twinstep.fast.optimizers.fused_adam import FusedAdam
from twinstep.fast.optimizers.fused_lamb import FusedLamb
from twinstep.fast.runtime.native import library

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
        self._coming: deque[tuple[Tensor | None, Tensor, torch.cuda.Event]] = deque()
        self._rooms: dict[object, Tensor] = {}
        self._held: dict[int, tuple[Tensor, Tensor]] = {}
        self._turn = self._rounds = 0
        self._summed = False

    def buffers(self) -> list[Tensor]:
        """Buffers of copies that have been made; they are kept."""
        return list(self._rooms.values())

    def _room(self, key: object, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory of the CPU, kept by a key; zeros at first."""
        room = self._rooms.get((key, dtype))
        if room is None or room.numel() < numel:
            room = torch.zeros(numel, dtype=dtype, pin_memory=self._pins)
            self._rooms[key, dtype] = room
        return room[:numel]

    def add(self, reduced: Tensor, first: int, received: Tensor) -> None:
        """Take gradients from the device, at the latest in `settle`.

        Args:
            reduced: this rank's partition of the sums of a group.
            first: place in it.
            received: its memory may be used again by what the current stream does next.
        """
        count, exact = received.numel(), reduced.dtype in (received.dtype, torch.float32)
        if not self._rounds and exact:
            # Whole at the end of the round, like every partition.
            held = self._room(reduced.data_ptr(), reduced.numel(), received.dtype)
            self._held[reduced.data_ptr()] = (reduced, held)
            self._bring(None, held[first : first + count], received)
            return
        if self._rounds:
            self.fold()
        self._summed = True
        sums = reduced[first : first + count]
        if not self._apart:
            accumulate_([sums], [received])
            return
        if len(self._coming) == ROOMS:
            self._take_first()
        self._turn = (self._turn + 1) % ROOMS
        self._bring(sums, self._room(self._turn, count, received.dtype), received)

    def _bring(self, sums: Tensor | None, place: Tensor, received: Tensor) -> None:
        """Start a copy from the device, which is added to sums if there are any."""
        place.copy_(received, non_blocking=self._apart)
        if self._apart:
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(torch.cuda.current_stream(received.device))
            self._coming.append((sums, place, arrived))

    def _take_first(self) -> None:
        sums, place, arrived = self._coming.popleft()
        arrived.synchronize()
        if sums is not None:
            accumulate_([sums], [place])

    def settle(self) -> None:
        """Take what is still on its way."""
        while self._coming:
            self._take_first()

    def end_round(self) -> None:
        """A micro-batch is complete."""
        self._rounds += 1

    def fold(self) -> None:
        """Add what is held to the sums, so that these are complete."""
        self.settle()
        for reduced, held in self._held.values():
            accumulate_([reduced], [held])
        self._summed |= bool(self._held)
        self._held.clear()

    def clear(self, reduced: Sequence[Tensor]) -> None:
        """Forget all gradients, those in the sums of all groups too."""
        self.settle()
        self._held.clear()
        for sums in reduced if self._summed else ():
            sums.zero_()
        self._summed, self._rounds = False, 0

    def gradients(self, reduced: Tensor) -> Tensor:
        """Gradients of a partition: held ones, or their sums."""
        known = self._held.get(reduced.data_ptr())
        return reduced if known is None else known[1]

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
            lists: master, sums of gradients (or what is held in their place), both moments.
            weights: this rank's part of the model's, on the device; written.
            step: completed steps; written.
            hyper: in the order of `fast.kernels.cpu.adam.HYPER`.
            bias_correction: False uses 1 for both corrections.
            decoupled: AdamW, not Adam.
        """
        master, reduced, *moments = lists
        grads, copy = self.gradients(reduced), weights
        if self._apart:
            copy = self._room(weights.data_ptr(), weights.numel(), weights.dtype)
        update_adam(
            named(*([tensor.detach()] for tensor in (master, grads, *moments, copy))),
            [step],
            hyper,
            bias_correction=bias_correction,
            decoupled=decoupled,
            as_sums=True,
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
