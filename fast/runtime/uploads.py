"""Uploads: CPU tensors copied to a GPU without waiting, and in order for every stream.

Not yet measured: nothing here has run on a GPU with more than one stream.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which `device` is current, if it is a GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def is_capturing(device: torch.device) -> bool:
    """Say whether a CUDA graph is being captured on the current stream of the device."""
    if device.type != "cuda":
        return False
    with on_device(device):
        return torch.cuda.is_current_stream_capturing()


class Upload:
    """A CPU tensor and its copy on a device; the current stream makes the copy.

    Args:
        host: the tensor; nothing writes to it any more.
        device: where kernels read it. On the CPU there is no copy.

    Attributes:
        host: the staging copy. The asynchronous copy, or a captured graph that repeats it, reads it
            later than the call that made it.
        data: the copy on the device.
    """

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self.host = self.data = host
        if device.type != "cuda":
            return
        with on_device(device):
            stream = torch.cuda.current_stream()
            self.host = host.pin_memory()
            self.data = self.host.to(device, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(stream)
        self._ordered = {stream}

    def order(self) -> None:
        """Order the current stream after the copy, and the end of its memory after that stream.

        Not for a stream that captures: it may wait for nothing outside of its graph.
        """
        if self.data.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.data.device)
        if stream not in self._ordered:
            stream.wait_event(self._arrived)
            self.data.record_stream(stream)
            self._ordered.add(stream)


class RenewedUpload(Upload):
    """An upload of which parts are written again, in order for every stream.

    Args:
        host: as of `Upload`.
        device: as of `Upload`.
        most: words in the largest part.
    """

    def __init__(self, host: Tensor, device: torch.device, most: int) -> None:
        super().__init__(host, device)
        self._ring = StagingRing(most)
        self._parts: dict[tuple[int, int], Tensor] = {}
        self._last = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def order(self) -> None:
        """Order the current stream after everything that other streams have to do by now."""
        if self._last is None:
            return
        stream = torch.cuda.current_stream(self.data.device)
        if stream != self._last:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._last)
            stream.wait_event(done)
            self.data.record_stream(stream)
            self._last = stream

    def renew(self, start: int, words: Tensor) -> None:
        """Write words from `start` on; after `order`."""
        key = start, words.numel()
        target = self._parts.get(key)
        if target is None:
            target = self._parts[key] = self.data[start : start + key[1]]
        if self._last is None:
            target.copy_(words)
        else:
            with on_device(self.data.device):
                self._ring.send(words, target)


class StagingRing:
    """Pinned buffers that take turns: one is written again only after its copy has been made.

    Where all are still in flight another one is added; the host never waits.
    """

    def __init__(self, words: int) -> None:
        self._words = words
        self._slots: list[tuple[Tensor, torch.cuda.Event]] = []

    def send(self, words: list[int] | Tensor, target: Tensor) -> None:
        """Copy at most as many words as there is room for to a GPU, asynchronously."""
        room, event = self._free_slot()
        buffer = room[: len(words)].copy_(torch.as_tensor(words))
        target.copy_(buffer, non_blocking=True)
        event.record()

    def _free_slot(self) -> tuple[Tensor, torch.cuda.Event]:
        for slot in self._slots:
            if slot[1].query():  # type: ignore[no-untyped-call]
                return slot
        buffer = torch.empty(self._words, dtype=torch.int64).pin_memory()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._slots.append((buffer, event))
        return self._slots[-1]
