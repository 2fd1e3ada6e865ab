"""Engines that run kernels: the GPU, replay of compiled code, the CPU, Triton's interpreter.

The engine is chosen per kernel and named in every cell of the ledger. The reference is always
evaluated on the CPU.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING

import torch
from torch._library.custom_ops import OPDEFS

from twinstep.parity.records.errors import NoDeviceError, UsageError
from twinstep.parity.records.names import ENGINES, unknown
from twinstep.parity.registry.kernels import Elsewhere, Kernel

if TYPE_CHECKING:
    from twinstep.replay.launch.record import Fates


@dataclass(frozen=True)
class Engine:
    """A place to run kernels, or the reason why there is none.

    Attributes:
        name: `cuda`, `replay`, `cpu` or `interpret`.
        device: where the tensors go.
        missing: why this engine cannot run here; empty if it can.
    """

    name: str
    device: torch.device
    missing: str = ""


def engine_named(name: str) -> Engine:
    """The engine of that name, and whether it can run here."""
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    device = torch.device("cuda" if name == "cuda" else "cpu")
    missing = ""
    if name == "cuda" and not torch.cuda.is_available():
        missing = "no CUDA GPU here"
    elif name in ("replay", "interpret") and find_spec("triton") is None:
        missing = "triton is not installed"
    elif name == "replay":
        missing = untested_triton()
    elif name == "interpret" and os.environ.get("TRITON_INTERPRET") != "1":
        missing = "TRITON_INTERPRET=1 must be set before kernels are imported"
    return Engine(name, device, missing)


@cache
def untested_triton() -> str:
    """Reason why replay refuses the Triton that is installed; empty if it does not."""
    from twinstep.replay.errors import UnsupportedTriton
    from twinstep.replay.triton.driver import check_version

    try:
        check_version(version("triton"))
    except UnsupportedTriton as error:
        return str(error).removesuffix(".")
    return ""


def require(name: str) -> None:
    """Refuse to start on an engine that was asked for and is missing.

    Raises:
        NoDeviceError: with exit code 4.
        UsageError: replay was not tested with the Triton that is installed.
    """
    engine = engine_named(name)
    if name == "replay" and (untested := find_spec("triton") and untested_triton()):
        raise UsageError(untested)
    if engine.missing:
        raise NoDeviceError(f"engine {name} was asked for, but {engine.missing} [--engine]")


def engine_for(kernel: Kernel, asked: str | None = None) -> Engine:
    """The engine that a kernel is judged on.

    Its own choice in order of preference, or else: Triton kernels on the GPU, without one on
    replay; CUDA C++ on replay, which compiles it; everything else on the CPU.

    Args:
        kernel: whose `engines` are looked at.
        asked: an engine that was asked for; a kernel that cannot run there is skipped by name.
    """
    return engine_among(claimed_engines(kernel), uses_triton(kernel.function), asked)


def engine_among(engines: Sequence[str], triton: bool, asked: str | None = None) -> Engine:
    """The first engine that can run here, or the one that was asked for.

    Args:
        engines: in order of preference; empty means the usual ones.
        triton: whether Triton kernels are launched.
        asked: an engine that was asked for.
    """
    claimed = tuple(engines) or (("cuda", "replay") if triton else ("cpu",))
    if asked is not None:
        engine = engine_named(asked)
        allowed = asked in claimed or _fits(asked, claimed, bool(engines))
        refusal = f"the kernel runs on {', '.join(claimed)}, not on {asked}"
        return engine if allowed else Engine(asked, engine.device, refusal)
    if not engines and os.environ.get("TRITON_INTERPRET") == "1" and "replay" in claimed:
        claimed = ("interpret",)
    choices = [engine_named(name) for name in claimed]
    return next((engine for engine in choices if not engine.missing), choices[-1])


def _fits(asked: str, claimed: tuple[str, ...], said: bool) -> bool:
    """Whether a kernel may try an engine it does not name; the interpreter takes any Triton."""
    return (asked == "interpret" and "replay" in claimed) or (asked == "cuda" and not said)


def uses_triton(function: Callable[..., object]) -> bool:
    """True if a function can reach a Triton kernel through names in its code or its closure.

    What else stands in the same file does not matter. Instances with `__call__`, bound methods and
    partials reach what they hold and what their functions reach.
    """
    if isinstance(function, Elsewhere):
        return function.triton
    return _reaches(function, _is_triton)


def claimed_engines(kernel: Kernel) -> tuple[str, ...]:
    """Engines of a kernel's own choice, or replay for CUDA C++ and PTX that it launches."""
    if kernel.engines or isinstance(kernel.function, Elsewhere):
        return kernel.engines
    return ("replay",) if _reaches(kernel.function, _is_launched_by_replay) else ()


def _reaches(
    function: Callable[..., object],
    wanted: Callable[[object], bool],
    depth: int = 3,
    seen: dict[object, int] | None = None,
) -> bool:
    """True if a function names what is wanted, or a function that does, to some depth.

    `seen` has the depth to which a function has been looked through already, in vain.
    """
    seen = {} if seen is None else seen
    if not isinstance(function, FunctionType):
        held = [*_held(function), *_functions_of(function)]
        inside = [value for value in held if isinstance(value, FunctionType)]
        reached = any(_reaches(value, wanted, depth, seen) for value in inside)
        return reached or any(map(wanted, held))
    if seen.get(function, -1) >= depth:
        return False
    seen[function] = depth
    for value in _named(function):
        if wanted(value):
            return True
        for inner in _functions_of(value) if depth else ():
            if inner is function or (inner.__module__ or "").startswith("torch"):
                continue
            if wanted(inner) or _reaches(inner, wanted, depth - 1, seen):
                return True
    return False


def _is_triton(value: object) -> bool:
    """True for a jitted function, and for modules and functions that end in one."""
    if isinstance(value, ModuleType):
        return _is_kernels(value.__name__)
    if isinstance(value, FunctionType):
        return _is_kernels(value.__module__ or "")
    return type(value).__module__.startswith("triton.runtime")


def _is_launched_by_replay(value: object) -> bool:
    owner = value if isinstance(value, FunctionType) else type(value)
    return owner.__module__ in ("twinstep.replay.cuda.nvrtc", "twinstep.replay.launch.run")


def _held(value: object) -> list[object]:
    """What a partial is given, or an instance has as attributes."""
    if isinstance(value, functools.partial):
        return [*value.args, *value.keywords.values()]
    return list(_attributes(getattr(value, "__self__", value)).values())


def _attributes(value: object) -> dict[str, object]:
    return dict(getattr(value, "__dict__", {}))


def _is_kernels(module: str) -> bool:
    """A module of Triton, or of the fast side, whose launchers all end in Triton kernels."""
    return module.split(".")[0] == "triton" or module.startswith("twinstep.fast")


def _named(function: Callable[..., object]) -> list[object]:
    """Values of the names in a function's code and closure, one attribute or table deep."""
    code, found = getattr(function, "__code__", None), list[object]()
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            found.append(cell.cell_contents)
    names = set(_names(code)) if code is not None else set()
    known = {**vars(builtins), **getattr(function, "__globals__", {})}
    values = [known[name] for name in sorted(names & known.keys())]
    modules = [value for value in values if isinstance(value, ModuleType)]
    own = [m for m in modules if m.__name__.split(".")[0] != "torch"]
    tables = [value for value in (*found, *values) if isinstance(value, dict | list | tuple)]
    # torch.ops.mylib.step(...)
    operators = [op for name, op in list(OPDEFS.items()) if names.issuperset(name.split("::"))]
    return [
        *found,
        *values,
        *operators,
        *(inner for t in tables for inner in (t.values() if isinstance(t, dict) else t)),
        *(vars(m)[name] for m in own for name in sorted(names & vars(m).keys())),
    ]


def _functions_of(value: object) -> list[FunctionType]:
    """A function, what a partial or bound method calls, and the functions of a class or instance.

    Those of an instance are its class's and its own: an operator of torch.library holds the
    function that it was made of.
    """
    if isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, MethodType):
        value = value.__func__
    # A cache around a function.
    value = getattr(value, "__wrapped__", value)
    if isinstance(value, FunctionType):
        return [value]
    rows = [] if isinstance(value, type | ModuleType) else list(_attributes(value).values())
    rows += vars(value if isinstance(value, type) else type(value)).values()
    rows += [inner for row in rows if isinstance(row, dict) for inner in row.values()]
    found = (getattr(row, "__func__", row) for row in rows)  # a static method's
    return [row for row in found if isinstance(row, FunctionType)]


def _names(code: CodeType) -> Iterator[str]:
    """Names in a code object and in the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


@contextlib.contextmanager
def running(engine: Engine) -> Iterator[None]:
    """Make an engine ready for the calls inside the block."""
    if engine.missing or engine.name not in ("replay", "cuda") or find_spec("triton") is None:
        yield
        return
    import twinstep.replay
    from twinstep.replay.triton.driver import fusion_by_default

    if engine.name == "cuda":
        with fusion_by_default():
            yield
        return
    twinstep.replay.activate()
    try:
        with twinstep.replay.options(strict_provenance=True):
            yield
    finally:
        twinstep.replay.deactivate()


@contextlib.contextmanager
def followed() -> Iterator[Fates | None]:
    """The ends of the launches on replay made inside the context; None if it is not in use."""
    record = sys.modules.get("twinstep.replay.launch.record")
    with contextlib.nullcontext() if record is None else record.fates() as found:
        yield found


def as_on(engine: Engine, function: Callable[..., object]) -> Callable[..., object]:
    """A function that finds the device of its engine; on replay a modelled GPU, while it runs."""
    if engine.name != "replay":
        return function

    @functools.wraps(function)
    def called(*args: object, **kwargs: object) -> object:
        from twinstep.replay import modelled_gpu

        with modelled_gpu():
            return function(*args, **kwargs)

    return called


def live_subnormals() -> bool:
    """True if this thread computes with subnormals instead of flushing them to zero."""
    half = torch.full((64,), 2.0**-126) * 0.5
    return bool((half == 2.0**-127).all()) and bool((half != 0).all())


def require_live_subnormals(after: str) -> None:
    """Refuse to judge in a thread that flushes subnormals to zero.

    Raises:
        UsageError: subnormals are flushed.
    """
    if not live_subnormals():
        raise UsageError(
            f"subnormal numbers are flushed to zero after {after}, but the reference needs them; "
            "remove torch.set_flush_denormal(True) or the library that sets it [subnormals]"
        )
