"""The GPU that replay reports, and the functions of torch that describe a GPU or wait for one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from types import SimpleNamespace

import torch
from torch.overrides import handle_torch_function

from twinstep.replay.launch.run import PROCESSORS

INDEX = 1000
"""Index that replay's driver gives Triton for its device; no machine has a GPU of that number."""

DEVICE = torch.device("cuda", 0)
CAPABILITY = (9, 0)


@dataclass(frozen=True)
class Properties:
    """Properties of an H100 (SXM5), by the names that torch gives them."""

    name: str = "NVIDIA H100 80GB HBM3"
    major: int = CAPABILITY[0]
    minor: int = CAPABILITY[1]
    multi_processor_count: int = PROCESSORS
    total_memory: int = 80 << 30
    L2_cache_size: int = 50 << 20
    max_threads_per_block: int = 1024
    max_threads_per_multi_processor: int = 2048
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 48 << 10
    shared_memory_per_block_optin: int = 227 << 10
    shared_memory_per_multiprocessor: int = 228 << 10
    warp_size: int = 32
    is_integrated: int = 0
    is_multi_gpu_board: int = 0


GPU = Properties()


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


def _checked(device: object = None) -> None:
    if device is not None and not isinstance(device, _Device) and not on_gpu(device):
        raise ValueError(f"Expected a cuda device, but got: {device}")


class Stream(torch.Stream):
    """A stream whose work is done when it has been given.

    Of torch's class, as `Tensor.record_stream` takes nothing else.
    """

    cuda_stream = 0
    priority = 0

    def __new__(cls, device: object = None, priority: int = 0, **_: object) -> Stream:
        """The first stream of the device.

        Raises:
            ValueError: the device is no GPU.
        """
        _checked(device)
        return super().__new__(cls, stream_id=0, device_index=0, device_type=1)

    def __enter__(self) -> Stream:
        """Make it the current one, which changes nothing."""
        return self

    def __exit__(self, *_: object) -> None:
        """End that."""

    def query(self) -> bool:
        """True: there is nothing to wait for."""
        return True

    def is_capturing(self) -> bool:
        """False: graphs are not modelled."""
        return False

    def synchronize(self) -> None:
        """Wait for nothing."""
        synchronize()

    def wait_event(self, event: Event) -> None:  # type: ignore[override]
        """Wait for nothing, on the device."""

    def wait_stream(self, stream: Stream) -> None:  # type: ignore[override]
        """Wait for nothing, on the device."""

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]
        """The event, or a new one, that has happened now."""
        event = event or Event()
        event.record(self)
        return event


class Event:
    """An event of a stream; the time is the host's."""

    def __init__(self, enable_timing: bool = False, **_: object) -> None:
        self._at = 0.0
        self.enable_timing = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        """Let it happen now."""
        self._at = perf_counter()

    def query(self) -> bool:
        """True: it has happened."""
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""
        synchronize()

    def wait(self, stream: Stream | None = None) -> None:
        """Wait for nothing, on the device."""

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds of the host's time between two events."""
        return 1000.0 * (end._at - self._at)


class _Device(contextlib.AbstractContextManager["_Device"]):
    """`torch.cuda.device` and its relatives: the one GPU is always the current one."""

    def __init__(self, device: object = None) -> None:
        tensor = isinstance(device, torch.Tensor)
        _checked(None if tensor or device in (-1, None) else device)
        self.idx = 0

    def __exit__(self, *_: object) -> None:
        """Leave it current."""


_STREAM = Stream()


def synchronize(device: object = None) -> None:
    """Wait for nothing; modes of torch functions see the call, as they see the reads of values."""
    if torch._C._is_torch_function_mode_enabled():
        handle_torch_function(synchronize, (), device)
    _checked(device)


@contextlib.contextmanager
def _stream(stream: Stream | None) -> Iterator[None]:
    yield


def _nothing(*_: object, **__: object) -> None:
    """Do nothing."""


def _always(value: object) -> Callable[..., object]:
    def answer(*args: object, **kwargs: object) -> object:
        return value

    return answer


def _for_device(value: object) -> Callable[..., object]:
    def answer(device: object = None) -> object:
        _checked(device)
        return value

    return answer


TORCH_CUDA: dict[str, object] = {
    "Event": Event,
    "Stream": Stream,
    "_lazy_init": _nothing,
    "current_device": _always(0),
    "current_stream": _for_device(_STREAM),
    "default_stream": _for_device(_STREAM),
    "device": _Device,
    "device_count": _always(1),
    "device_of": _Device,
    "empty_cache": _nothing,
    "get_arch_list": _always(["sm_90"]),
    "get_device_capability": _for_device(CAPABILITY),
    "get_device_name": _for_device(GPU.name),
    "get_device_properties": _for_device(GPU),
    "init": _nothing,
    "is_available": _always(True),
    "is_bf16_supported": _always(True),
    "is_current_stream_capturing": _always(False),
    "is_initialized": _always(True),
    "manual_seed": torch.default_generator.manual_seed,
    "manual_seed_all": torch.default_generator.manual_seed,
    "max_memory_allocated": _for_device(0),
    "mem_get_info": _for_device((GPU.total_memory, GPU.total_memory)),
    "memory_allocated": _for_device(0),
    "memory_reserved": _for_device(0),
    "reset_peak_memory_stats": _for_device(None),
    "set_device": _Device,
    "set_stream": _nothing,
    "stream": _stream,
    "synchronize": synchronize,
}
INTERFACE = SimpleNamespace(**TORCH_CUDA)
"""What Triton's own timing functions ask the driver for."""

OTHERS: tuple[tuple[object, str, object], ...] = (
    (torch._C, "_cuda_getCurrentRawStream", _always(0)),
    (torch.accelerator, "current_accelerator", _always(torch.device("cuda"))),
    (torch.accelerator, "current_device_index", _always(0)),
    (torch.accelerator, "current_stream", _for_device(_STREAM)),
    (torch.accelerator, "device_count", _always(1)),
    (torch.accelerator, "is_available", _always(True)),
    (torch.accelerator, "synchronize", synchronize),
    (torch.cuda.nvtx, "mark", _nothing),
    (torch.cuda.nvtx, "range_pop", _nothing),
    (torch.cuda.nvtx, "range_push", _nothing),
)
PATCHES = (*((torch.cuda, name, value) for name, value in TORCH_CUDA.items()), *OTHERS)
"""Module, name, and what is there while a GPU is modelled."""
