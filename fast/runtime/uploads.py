"""Uploads: CPU tensors copied to a GPU without waiting, and in order for every stream.

Not yet measured: nothing here has run on a GPU with more than one stream.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """A context in which `device` is current, if it is a GPU."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
    else:
        yield


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
