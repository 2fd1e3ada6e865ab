"""A CUDA device that tests can ask for, whose tensors lie on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from twinstep.replay.triton.driver import activate, deactivate


def _here(value: object) -> object:
    """The CPU in place of a CUDA device; anything else unchanged."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value


class _OnTheCpu(TorchFunctionMode):
    """torch functions make and move tensors to the CPU where they are asked for CUDA."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = {name: _here(value) for name, value in (kwargs or {}).items()}
        return func(*map(_here, args), **kwargs)


@contextlib.contextmanager
def cuda_on_replay() -> Iterator[None]:
    """Kernels run on replay, and torch answers as if there were a CUDA device."""
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    answers: dict[str, Callable[..., object]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "replay",
        "current_stream": lambda device=None: stream,
        "synchronize": lambda device=None: None,
        "device": lambda device=None: contextlib.nullcontext(),
    }
    activate()
    try:
        with _OnTheCpu(), contextlib.ExitStack() as patches:
            for name, answer in answers.items():
                patches.enter_context(mock.patch.object(torch.cuda, name, answer))
            yield
    finally:
        deactivate()
