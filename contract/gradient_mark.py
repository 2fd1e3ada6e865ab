"""Gradients that an optimizer's own `backward` did not leave: found by looking at one of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor


class GradientMark:
    """The first gradient of some parameters, as it was when it was last looked at.

    One tensor is looked at, on the host: its identity, and how often it was written in place.
    """

    def __init__(self) -> None:
        self._seen: weakref.ref[Tensor] | None = None
        self._version = 0

    def look(self, params: Iterable[Tensor]) -> None:
        """Remember the first gradient."""
        grad = _first(params)
        self._seen = None if grad is None else weakref.ref(grad)
        self._version = _version(grad)

    def differs(self, params: Iterable[Tensor]) -> bool:
        """True if there is a gradient, and it is another one or was written since."""
        grad = _first(params)
        if grad is None:
            return False
        known = None if self._seen is None else self._seen()
        if known is None:
            return True
        # A tensor that C++ alone had kept alive is Python's again.
        known._fix_weakref()  # type: ignore[attr-defined]
        return known is not grad or self._version != _version(grad)


def _first(params: Iterable[Tensor]) -> Tensor | None:
    return next((param.grad for param in params if param.grad is not None), None)


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None or grad.is_inference() else grad._version
