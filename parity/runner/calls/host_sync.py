"""Reads of device values by the host while a launcher runs.

A launcher that reads a device value waits for everything queued before it, and cannot be captured
as a CUDA graph. The reads that PyTorch offers all pass one of two places, on the CPU as on a GPU.

On the CPU, where replay keeps its tensors, those count as device memory that the kernel was given,
that were made without values (`torch.empty`, for a kernel to fill), and whatever was computed from
either; what the launcher builds from Python numbers does not.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from twinstep.parity.runner.calls.places import is_library

# Operators whose result, or the size of whose result, is a device value.
SYNCHRONISING = frozenset(
    ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")
)
COPIES = frozenset(("tolist", "numpy", "cpu"))
# Of the GPU that replay models for a launcher; a real one refuses it in a capture.
WAITS = frozenset(("synchronize",))


class _Device:
    """Which tensors hold device values."""

    def __init__(self, given: Tensor) -> None:
        # Storages are kept alive, so that no other takes the address of one.
        self.kept = {given.untyped_storage()._cdata: given}

    def among(self, values: Iterable[object]) -> bool:
        """True if one of the values is a tensor that holds device values."""
        tensors = [value for value in _flat(values) if isinstance(value, Tensor)]
        return any(t.is_cuda or t.untyped_storage()._cdata in self.kept for t in tensors)

    def add(self, values: Iterable[object]) -> None:
        """These hold device values too."""
        for value in _flat(values):
            if isinstance(value, Tensor):
                self.kept[value.untyped_storage()._cdata] = value


class _Numbers(_Device):
    """Which tensors hold floats of the lists, or what came of them; of controls it does not."""

    def __init__(self, data: Iterable[Tensor]) -> None:
        self.kept = {}
        data = list(data)
        self.places = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in data]
        # Controls are in the same memory: a view of a list says nothing of all of it.
        self.memory = {t.untyped_storage()._cdata for t in data}

    def among(self, values: Iterable[object]) -> bool:
        """True if one of the values is a tensor that holds such floats."""
        floats = [t for t in _flat(values) if isinstance(t, Tensor) and t.is_floating_point()]
        given = any(start <= t.data_ptr() < stop for t in floats for start, stop in self.places)
        return given or super().among(floats)

    def add(self, values: Iterable[object]) -> None:
        """These hold such floats too; what lies among the lists is known by its place."""
        tensors = [value for value in _flat(values) if isinstance(value, Tensor)]
        super().add(t for t in tensors if t.untyped_storage()._cdata not in self.memory)


def _flat(values: Iterable[object]) -> Iterator[object]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operators that wait for the device, and follows where its values go."""

    def __init__(self, reads: list[str], device: _Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads = reads
        self.device = device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would import its compiler inside the first call, seconds of its limit."""
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        name = str(func).split(".")[1]
        touched = self.device.among(args)
        if name in SYNCHRONISING and touched:
            self.reads.append(f"{name} at {_caller()}")
        result = func(*args, **(kwargs or {}))
        if touched or name.startswith(("empty", "new_empty")):
            self.device.add([result])
        return result


class _Methods(TorchFunctionMode):
    """Notes methods that copy to the host without an operator."""

    def __init__(self, reads: list[str], device: _Device) -> None:
        super().__init__()
        self.reads = reads
        self.device = device

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        name = getattr(func, "__name__", "")
        if name in WAITS or (name in COPIES and self.device.among(args)):
            self.reads.append(f"{name} at {_caller()}")
        return func(*args, **(kwargs or {}))


def _caller() -> str:
    """File and line of the innermost frame that is no library's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@contextlib.contextmanager
def watched(given: Tensor) -> Iterator[list[str]]:
    """Collect what the host reads inside the block of device values, with file and line.

    Args:
        given: the memory that the kernel is given views of.
    """
    with _noted(_Device(given)) as reads:
        yield reads


@contextlib.contextmanager
def numbers_read(data: Iterable[Tensor]) -> Iterator[list[str]]:
    """Collect what the host reads of floats of these tensors, or of what was computed from them."""
    with _noted(_Numbers(data)) as reads:
        yield reads


@contextlib.contextmanager
def _noted(device: _Device) -> Iterator[list[str]]:
    reads: list[str] = []
    with _Methods(reads, device), _Operators(reads, device):
        yield reads
