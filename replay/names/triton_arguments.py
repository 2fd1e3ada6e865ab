"""Arguments of Triton kernels that have names: floats for Triton's binder, else numbers.

A compile-time argument has no name: code compiled for one value is another program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from triton.language import constexpr
from triton.runtime.jit import JITFunction

from twinstep.replay.machine.named import HostNumber, NamedFloat
from twinstep.replay.names.session import NotNamed


@contextmanager
def named_arguments() -> Iterator[None]:
    """Let launches inside the context take a `HostNumber` for a float."""
    before = JITFunction.run

    def _run(self: Any, *args: Any, grid: Any, **words: Any) -> Any:
        given = {**dict(zip(self.arg_names, args, strict=False)), **words}
        for param in self.params:
            value = given.get(param.name)
            if _compiled_in(value, param.is_constexpr):
                place = f"{self.fn.__module__}.{self.fn.__qualname__}, argument {param.name}"
                raise NotNamed(f"a number that has a name is compiled in: {place}", "names", place)
        own = _seeing(grid, given) if callable(grid) else grid
        plain = {name: _plain(value) for name, value in words.items()}
        return before(self, *map(_plain, args), grid=own, **plain)

    JITFunction.run = _run
    try:
        yield
    finally:
        JITFunction.run = before


def _compiled_in(value: object, inside: bool) -> bool:
    """True if a named number is, or is part of, a compile-time value."""
    if isinstance(value, constexpr):
        return _compiled_in(value.value, True)
    if isinstance(value, tuple | list):
        return any(_compiled_in(item, inside) for item in value)
    return inside and isinstance(value, HostNumber)


def _plain(value: Any) -> Any:
    """What Triton is given for a value."""
    if isinstance(value, HostNumber):
        return NamedFloat.of(value)
    if isinstance(value, tuple) and any(isinstance(item, HostNumber | tuple) for item in value):
        items = map(_plain, value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def _seeing(
    grid: Callable[[Mapping[str, Any]], Any], given: Mapping[str, Any]
) -> Callable[[Mapping[str, Any]], Any]:
    """A grid's function that sees the numbers themselves."""
    return lambda bound: grid({**bound, **{n: given[n] for n in bound if n in given}})
