"""`torch.cuda` as launchers call it, for a modelled H100 whose memory is the CPU's.

Inside `modelled_gpu()` tensors are on "cuda:0", but for those that the code inside makes on the
host; "cuda" is accepted wherever torch takes a device; functions of `torch.cuda` describe the GPU
that replay reports to Triton. Where a GPU would copy between host and device, memory is copied, and
no kernel takes host memory that is not pinned.

Not modelled: CUDA graphs, generators on the device, torch's error for tensors of both sides in one
operation. Work is done when it is given to a stream; that streams wait for one another is checked
where races are (`checks.streams`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves

from twinstep.replay.checks.streams import ORDER
from twinstep.replay.errors import ReplayError
from twinstep.replay.triton.device import DEVICE, on_gpu
from twinstep.replay.triton.gpu import PATCHES
from twinstep.replay.triton.streams import note, ordered

CPU = torch.device("cpu")
ANSWERS: Mapping[object, object] = {
    Tensor.device.__get__: DEVICE,
    Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]
    Tensor.get_device: 0,
    Tensor.is_pinned: False,
    Tensor.record_stream: None,
}
"""What is asked of a tensor, and the answer if it is on the device."""
MOVED: Callable[..., object] = Tensor.to
TRANSFERS = (Tensor.cpu, Tensor.cuda, Tensor.to)
CONSTRUCTORS = frozenset(_device_constructors())
LOAD = torch.load
ENGINE: Callable[..., object] = torch.autograd.graph._engine_run_backward
TO_NUMPY = (Tensor.numpy, Tensor.__array__)
# Facts of a tensor that are the same on both sides, and no tensors.
FACTS = frozenset(
    {
        *(Tensor.data_ptr, Tensor.numel, Tensor.stride, Tensor.size, Tensor.dim),
        *(Tensor.is_contiguous, Tensor.element_size, Tensor.storage_offset),
        *(Tensor.dtype.__get__, Tensor.shape.__get__, Tensor.layout.__get__),  # type: ignore[attr-defined]
    }
)
Arguments = tuple[object, ...]
Keywords = dict[str, object]


class _Sides(TorchFunctionMode):
    """Keeps apart tensors of the host and of the device, which are all in CPU memory.

    A tensor is the device's unless torch was seen to make it on the host: what is not seen (NumPy's
    memory, a tensor of an earlier call) is no false alarm.
    """

    def __init__(self) -> None:
        super().__init__()
        # Storages of the host, and whether they are pinned. No other storage takes the number of
        # one while the reference lives.
        self._host: dict[int, tuple[StorageWeakRef, bool]] = {}
        self._prune_at = 256

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Arguments = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Answer for the device, or let the CPU do it and note on which side the result is."""
        if func in FACTS:
            return func(*args, **(kwargs or {}))
        named = dict(kwargs or {})
        subject = args[0] if args and isinstance(args[0], Tensor) else None
        if subject is not None and func in ANSWERS and self.on_device(subject):
            return ANSWERS[func]
        if subject is not None and func in TO_NUMPY and self.on_device(subject):
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the "
                "tensor to host memory first."
            )
        if subject is not None and func is Tensor.pin_memory:
            return self._noted(subject.clone(), on_device=False, pinned=True)
        if subject is not None and func is Tensor.is_pinned:
            return self._pinned(subject)
        args, named, wanted = self._on_cpu(func, args, named)
        pinned = named.pop("pin_memory", False) is True
        result = (MOVED if func is Tensor.cuda else func)(*args, **named)
        if wanted is None:
            sides = [self.on_device(x) for x in _tensors((args, list(named.values())))]
            wanted = any(sides)
        if ORDER.get() is not None:
            given, made = (args, list(named.values())), (result,) if wanted else ()
            parts = (args[:1], given, made, (named.get("out"),))
            note(func, *(list(filter(self.on_device, _tensors(part))) for part in parts))
        if func in TRANSFERS and isinstance(subject, Tensor) and isinstance(result, Tensor):
            return self._transferred(subject, result, wanted)
        return self._noted(result, on_device=wanted, pinned=pinned)

    def on_device(self, tensor: Tensor) -> bool:
        """True unless the tensor is the host's."""
        return not self._host or _storage(tensor) not in self._host

    def reaches(self, tensor: Tensor) -> bool:
        """True if a kernel may take the tensor: it is on the device, or pinned."""
        return self.on_device(tensor) or self._pinned(tensor)

    def _pinned(self, tensor: Tensor) -> bool:
        return self._host.get(_storage(tensor), (None, False))[1]

    def _on_cpu(
        self, func: Callable[..., object], args: Arguments, named: Keywords
    ) -> tuple[Arguments, Keywords, bool | None]:
        """The arguments with the CPU for every device, and the side that is asked for, if any."""
        if func is Tensor.cuda:
            on_gpu(args[1] if len(args) > 1 else named.get("device"))
            return args[:1], {"device": CPU}, True
        if func is Tensor.cpu:
            return args, named, False
        moving = func is Tensor.to
        wanted: bool | None = None
        new: list[object] = []
        for place, value in enumerate(args):
            device = isinstance(value, torch.device) or (moving and isinstance(value, str | int))
            # The second place of `to` may be a flag.
            side = on_gpu(value) if device and place and not isinstance(value, bool) else None
            wanted = wanted if side is None else side
            if moving and place == 1 and isinstance(value, Tensor):
                wanted = self.on_device(value)
            new.append(value if side is None else CPU)
        side = on_gpu(named.get("device"))
        if side is not None:
            wanted, named = side, {**named, "device": CPU}
        other = named.get("other")
        if moving and isinstance(other, Tensor):
            wanted = self.on_device(other)
        if wanted is None and func in CONSTRUCTORS and _default_is_gpu():
            wanted, named = True, {**named, "device": CPU}
        return tuple(new), named, wanted

    def _transferred(self, source: Tensor, result: Tensor, on_device: bool) -> Tensor:
        """The result of a transfer, copied if it changes sides."""
        moved = on_device != self.on_device(source)
        if moved and _storage(result) == _storage(source):
            result = result.clone()
        self._noted(result, on_device=on_device)
        return result

    def _noted(self, result: object, *, on_device: bool, pinned: bool = False) -> object:
        """The result, its tensors noted if they are the host's."""
        if not on_device:
            self.note_host(_tensors((result,)), pinned=pinned)
        if len(self._host) > self._prune_at:
            self._host = {n: row for n, row in self._host.items() if not row[0].expired()}  # type: ignore[no-untyped-call]
            self._prune_at = 2 * len(self._host) + 256
        return result

    def note_host(self, tensors: Iterable[Tensor], *, pinned: bool = False) -> None:
        """Note that tensors which are not known yet are the host's."""
        for tensor in tensors:
            number = _storage(tensor)
            if number and number not in self._host:
                self._host[number] = _reference(tensor), pinned


def _default_is_gpu() -> bool:
    """True after `torch.set_default_device("cuda")`."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return context is not None and on_gpu(context.device) is True


def _storage(tensor: Tensor) -> int:
    """Number of a tensor's storage; 0 where there is none."""
    try:
        return int(_dense(tensor).untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def _reference(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(_dense(tensor).untyped_storage())  # type: ignore[no-untyped-call]


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, or what holds the elements of a sparse one."""
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _load(file: object, map_location: object = None, **given: object) -> object:
    """`torch.load`, which no mode sees: what is asked for on the CPU is the host's."""
    result = cast(object, LOAD(file, map_location=CPU, **given))  # type: ignore[arg-type]
    sides = _SIDES.get()
    if sides is not None and on_gpu(map_location) is False:
        sides.note_host(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
    return result


def _run_backward(*args: object, **given: object) -> object:
    """Torch's engine of gradients; a mode is off while torch handles a call, and on for hooks."""
    sides = _SIDES.get()
    off = sides is not None and sides not in _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    with sides if sides is not None and off else contextlib.nullcontext():
        return ENGINE(*args, **given)


_SIDES: ContextVar[_Sides | None] = ContextVar("modelled GPU", default=None)
SEEN_BY_NO_MODE = (
    (torch, "load", _load),
    (torch.autograd, "_engine_run_backward", _run_backward),
)
_LOCK = threading.Lock()
_DEPTH = 0
_ORIGINALS: list[tuple[object, str, object]] = []
_ABSENT = object()


class _InThread:
    """A function or class of torch, replaced for threads that find the modelled GPU."""

    def __init__(self, name: str, modelled: object, original: object) -> None:
        self._name, self._modelled, self._original = name, modelled, original

    def _own(self) -> object:
        if _SIDES.get() is not None:
            return self._modelled
        if self._original is _ABSENT:
            raise AttributeError(f"this build of torch has no {self._name}")
        return self._original

    def __call__(self, *args: object, **kwargs: object) -> object:
        return cast(Callable[..., object], self._own())(*args, **kwargs)

    def __getattr__(self, name: str) -> object:
        return getattr(self._own(), name)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, cast(type, self._own()))


@contextlib.contextmanager
def modelled_gpu() -> Iterator[None]:
    """Let code of this thread find a GPU, with CPU memory, inside the context."""
    if _SIDES.get() is not None:
        yield
        return
    sides = _Sides()
    token = _SIDES.set(sides)
    _replace_functions()
    try:
        with sides, ordered():
            yield
    finally:
        _put_functions_back()
        _SIDES.reset(token)


def modelled() -> bool:
    """True if this thread finds the modelled GPU."""
    return _SIDES.get() is not None


def refuse_host(name: str, tensor: Tensor) -> None:
    """Refuse an argument that a GPU could not reach.

    Raises:
        ReplayError: the tensor was made on the host, and its memory is not pinned.
    """
    sides = _SIDES.get()
    if sides is not None and not sides.reaches(tensor):
        raise ReplayError(
            f"Argument {name} is a tensor on the CPU, which a kernel cannot access on a GPU: make "
            f"it with device=, or move it."
        )


def _replace_functions() -> None:
    global _DEPTH
    with _LOCK:
        _DEPTH += 1
        if _DEPTH == 1:
            for owner, name, value in (*PATCHES, *SEEN_BY_NO_MODE):
                original = getattr(owner, name, _ABSENT)
                _ORIGINALS.append((owner, name, original))
                setattr(owner, name, _InThread(name, value, original))


def _put_functions_back() -> None:
    global _DEPTH
    with _LOCK:
        _DEPTH -= 1
        while _ORIGINALS and _DEPTH == 0:
            owner, name, value = _ORIGINALS.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
