"""Requests to a kernel's process and its replies, as bytes.

Tensors travel by value: torch's own way puts each into shared memory, where the other side could
change it later. Operations travel by name. Classes that are not of the judge, a user's wherever he
has defined them, exist in the kernel's process alone: others stand in for them.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from twinstep.parity.operations.operation import Operation
from twinstep.parity.operations.table import operation_named

# Of their subclasses, as an Enum of dtypes or NumPy's numbers, the value travels.
PLAIN: tuple[tuple[type, Callable[[Any], object]], ...] = (
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
)
HARMLESS = {
    ("builtins", name)
    for name in ("set", "frozenset", "bytearray", "complex", "slice", "str", "int", "float")
}
Rebuild = tuple[Callable[..., object], tuple[object, ...]]
Unpacked = tuple[str, Any]


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Rebuild:
        if isinstance(value, Tensor):
            return _reduced(value.detach().cpu().contiguous())
        if isinstance(value, Operation):
            return operation_named, (value.name, "another process", value.accepts)
        if isinstance(value, type) and not _known(value.__module__, value.__name__, value):
            return _stand_in, (value.__name__,)
        for kind, plain in PLAIN:
            if isinstance(value, kind) and not _known(
                type(value).__module__, type(value).__name__, type(value)
            ):
                return kind, (plain(value),)
        return cast(Rebuild, NotImplemented)


def _reduced(tensor: Tensor) -> Rebuild:
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return _tensor, (data, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _tensor(data: bytes, dtype: str, shape: tuple[int, ...]) -> Tensor:
    kind = getattr(torch, dtype)
    if not data:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=kind).reshape(shape)


def _stand_in(name: str) -> type:
    """A class of that name in the place of one that only the kernel's process has."""
    return type(name, (), {})


def _known(module: str, name: str, kind: object) -> bool:
    """True for a class that both sides have: of the judge, where it is defined, or a harmless one.

    A module of ours can lead to any other.
    """
    if (module, name) in HARMLESS:
        return True
    own = module.startswith("twinstep.") and isinstance(kind, type) and kind.__module__ == module
    return own and getattr(sys.modules.get(module), name, None) is kind


def packed(value: object) -> bytes:
    """Bytes of a request or reply."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return stream.getvalue()


def unpacked(data: bytes) -> Unpacked:
    """The request or reply that some bytes hold.

    Raises:
        pickle.UnpicklingError: it asks for anything but the classes of messages, as a reply that a
            kernel has forged may.
    """
    kind, value = _Unpickler(io.BytesIO(data)).load()
    return str(kind), value


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        ours = module.startswith("twinstep.") or (module, name) in HARMLESS
        found = super().find_class(module, name) if ours else None
        if _known(module, name, found) or found in (_tensor, _stand_in, operation_named):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a message")
