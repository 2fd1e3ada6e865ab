"""The GPU that replay reports, and the functions of torch that describe a GPU or use one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from twinstep.replay.checks.streams import STREAM
from twinstep.replay.launch.run import PROCESSORS
from twinstep.replay.triton.device import Device, checked
from twinstep.replay.triton.streams import (
    Event,
    Stream,
    current_stream,
    default_stream,
    on_stream,
    set_stream,
    synchronize,
)

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


def _nothing(*_: object, **__: object) -> None:
    """Do nothing."""


def _always(value: object) -> Callable[..., object]:
    def answer(*args: object, **kwargs: object) -> object:
        return value

    return answer


def _for_device(value: object) -> Callable[..., object]:
    def answer(device: object = None) -> object:
        checked(device)
        return value

    return answer


TORCH_CUDA: dict[str, object] = {
    "Event": Event,
    "Stream": Stream,
    "_lazy_init": _nothing,
    "current_device": _always(0),
    "current_stream": current_stream,
    "default_stream": default_stream,
    "device": Device,
    "device_count": _always(1),
    "device_of": Device,
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
    "set_device": Device,
    "set_stream": set_stream,
    "stream": on_stream,
    "synchronize": synchronize,
}
INTERFACE = SimpleNamespace(**TORCH_CUDA)
"""What Triton's own timing functions ask the driver for."""

OTHERS: tuple[tuple[object, str, object], ...] = (
    (torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM.get()),
    (torch.accelerator, "current_accelerator", _always(torch.device("cuda"))),
    (torch.accelerator, "current_device_index", _always(0)),
    (torch.accelerator, "current_stream", current_stream),
    (torch.accelerator, "device_count", _always(1)),
    (torch.accelerator, "is_available", _always(True)),
    (torch.accelerator, "synchronize", synchronize),
    (torch.cuda.nvtx, "mark", _nothing),
    (torch.cuda.nvtx, "range_pop", _nothing),
    (torch.cuda.nvtx, "range_push", _nothing),
)
PATCHES = (*((torch.cuda, name, value) for name, value in TORCH_CUDA.items()), *OTHERS)
"""Module, name, and what is there while a GPU is modelled."""
