"""Launches of kernels that Triton has compiled already, past Triton's own Python.

Triton binds and specialises all arguments again at every launch, which takes longer than a small
kernel runs. Here a launch is looked up by what Triton would specialise on; the first one of a kind
goes through Triton, which compiles it. A test compares what both ways hand to the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any, Protocol, cast

import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

Key = tuple[object, ...]
_GET: Callable[..., object] = dict.get
_DTYPE: Callable[[object], object] = attrgetter("dtype")
_STATE: Callable[[object], object] = attrgetter("hash", "pre_run_hooks")
_INT32 = range(-(2**31), 2**31)
_INT64 = range(-(2**63), 2**63)
FIRST = 9  # place of a kernel's first argument among those of a compiled kernel's launcher


class Jitted(Protocol):
    """A function under `@triton.jit`."""

    __name__: str

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """The kernel, ready to be called on a grid."""


class Driver(Protocol):
    """A driver of Triton's."""

    def get_current_device(self) -> int:
        """Index of the device that is launched on."""

    def get_current_stream(self, device: int) -> int:
        """Its current stream."""


@dataclass(eq=False)
class Known:
    """Facts about one kernel, and its launches.

    Attributes:
        kernel: kept alive, since it is found by its identity.
        source: hash of the source that was compiled.
        aligned: of each argument, whether Triton specialises on a multiple of 16.
        typed: of each argument, whether an annotation gives its type.
        equal: of each argument, whether Triton specialises on an integer's value.
        modules: that the source has read names of.
        names: that it has read, each with its module.
        values: that they had.
        kinds: places of tensors, of those that may be aligned, and of integers that matter, by the
            types of all arguments; None where Triton must decide.
        launches: itself, compiled kernel and constants by key.
    """

    kernel: Any
    source: str
    aligned: list[bool]
    typed: list[bool]
    equal: list[bool]
    modules: list[dict[str, object]]
    names: list[str]
    values: list[object]
    kinds: dict[Key, tuple[list[int], list[int], list[int]] | None] = field(default_factory=dict)
    launches: dict[Key, Started] = field(default_factory=dict)

    def unchanged(self) -> bool:
        """Return True while nothing hooks the kernel, and its source has read what it reads now."""
        if self.source != self.kernel.hash or self.kernel.pre_run_hooks:
            return False
        # Triton refuses a kernel whose globals have changed: it decides.
        return all(map(is_, map(_GET, self.modules, self.names), self.values))

    def sort(self, types: tuple[type, ...]) -> tuple[list[int], list[int], list[int]] | None:
        """Places among arguments of these types."""
        places = range(len(types))
        tensors = [place for place in places if issubclass(types[place], Tensor)]
        numbers = [place for place in places if types[place] is int]
        if len(tensors) + len(numbers) < len(types):
            return None
        matter = [place for place in numbers if self.equal[place] or not self.typed[place]]
        return tensors, [place for place in tensors if self.aligned[place]], matter


class Sources:
    """Sources of several kernels, looked at together.

    Args:
        kernels: that are unchanged now.
    """

    def __init__(self, kernels: Sequence[Known]) -> None:
        self._kernels = [known.kernel for known in kernels]
        self._states: list[object] = [(known.source, []) for known in kernels]
        # What several kernels have read is looked up once.
        read = {
            (id(names), name, id(value)): (names, name, value)
            for known in kernels
            for names, name, value in zip(known.modules, known.names, known.values, strict=True)
        }
        self._modules = [names for names, _, _ in read.values()]
        self._names = [name for _, name, _ in read.values()]
        self._values = [value for _, _, value in read.values()]

    def unchanged(self) -> bool:
        """Return True while `Known.unchanged` holds for all of them."""
        if list(map(_STATE, self._kernels)) != self._states:
            return False
        return all(map(is_, map(_GET, self._modules, self._names), self._values))


Started = tuple[Known, Any, tuple[object, ...]]
_KNOWN: dict[int, Known] = {}


def start(
    kernel: Jitted,
    driver: Driver | None,
    programs: int,
    args: Sequence[object],
    options: dict[str, object],
) -> Started | None:
    """Launch a kernel on the current device, as `kernel[(programs,)](*args, **options)` does.

    Args:
        kernel: under `@triton.jit`.
        driver: Triton's, or None under its interpreter.
        programs: at least one.
        args: everything but the constants, by position.
        options: constants, and options of the compiler.

    Returns:
        What was launched, for `call_of`; None where Triton has launched it.
    """
    key = None if driver is None else _key(kernel, driver, args, options)
    if driver is None or key is None:
        kernel[(programs,)](*args, **options)
        return None
    known = _KNOWN[id(kernel)]
    found = known.launches.get(key)
    if found is None:
        compiled = kernel[(programs,)](*args, **options)
        params = known.kernel.params[len(args) :]
        constants = tuple(options[param.name] for param in params)
        known.launches[key] = known, compiled, constants
        return None
    stream = driver.get_current_stream(cast(int, key[1]))
    call, words = call_of(found, programs, stream, args)
    call(*words)
    return found


def call_of(
    started: Started, programs: int, stream: int, args: Sequence[object]
) -> tuple[Callable[..., object], tuple[object, ...]]:
    """The function that launches a compiled kernel, and its arguments: FIRST is the kernel's."""
    _, compiled, constants = started
    function, packed = compiled.function, compiled.packed_metadata
    grid = (programs, 1, 1, stream, function, packed, None, None, None)
    return compiled.run, (*grid, *args, *constants)


def surroundings(driver: Driver) -> Key | None:
    """Facts that decide about every launch beside its arguments; None leaves it to Triton."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    # A profiler that wants to hear of launches.
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        return None
    # Somebody who asks to be told what is compiled may also keep it from being compiled.
    if runtime.add_stages_inspection_hook is not None or runtime.jit_cache_hook is not None:
        return None
    mode = triton.knobs.compilation.instrumentation_mode
    return driver, driver.get_current_device(), runtime.debug, mode


def _key(
    kernel: Any, driver: Driver, args: Sequence[object], options: Mapping[str, object]
) -> Key | None:
    """What decides which compiled kernel a launch takes; None leaves the launch to Triton."""
    known = _KNOWN.get(id(kernel))
    if known is None or known.source != kernel.hash:
        known = _look_at(kernel)
    around = surroundings(driver)
    if known is None or around is None or not known.unchanged():
        return None
    types = tuple(map(type, args))
    if types not in known.kinds:
        known.kinds[types] = known.sort(types)
    kind = known.kinds[types]
    if kind is None:
        return None
    tensors, aligned, numbers = kind
    return (
        *around,
        types,
        *map(_DTYPE, map(args.__getitem__, tensors)),
        *[cast(Tensor, args[place]).data_ptr() % 16 == 0 for place in aligned],
        *[_specialised(known, place, cast(int, args[place])) for place in numbers],
        tuple(options),
        tuple(options.values()),
    )


def _specialised(known: Known, place: int, value: int) -> Key:
    """What Triton makes of an integer."""
    width = () if known.typed[place] else (value in _INT32, value in _INT64)
    if not known.equal[place]:
        return width
    return (*width, value == 1, known.aligned[place] and value % 16 == 0)


def _look_at(kernel: Any) -> Known | None:
    """Note what a kernel's launches are specialised on, once Triton has compiled one of them."""
    if type(kernel) is not JITFunction or kernel.hash is None:
        return None
    # Other backends specialise on more, such as the size of a tensor's memory.
    if triton.runtime.driver.active.get_current_target().backend != "cuda":
        return None
    params = [param for param in kernel.params if not param.is_constexpr]
    if any(param.is_constexpr for param in kernel.params[: len(params)]):
        return None
    known = _KNOWN[id(kernel)] = Known(
        kernel=kernel,
        source=kernel.hash,
        aligned=[not param.do_not_specialize_on_alignment for param in params],
        typed=[bool(param.annotation_type) for param in params],
        equal=[not param.do_not_specialize for param in params],
        modules=[names for _, names in kernel.used_global_vals.values()],
        names=[name for name, _ in kernel.used_global_vals],
        # Triton has copies of the values, and compares with these at its own launches.
        values=[names.get(name) for (name, _), (_, names) in kernel.used_global_vals.items()],
    )
    return known
