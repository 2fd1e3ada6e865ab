"""State of an optimizer that counts its own changes, so that a step need not look at all of it.

Everything else about these dicts is as of any dict. Copies and pickles of them are plain ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from itertools import count
from typing import Any, TypeVar

from torch import Tensor

_NUMBERS = count(1)
_DICT = TypeVar("_DICT", bound=type[dict[Any, Any]])


class Changes:
    """Number of the latest change of any watched dict of the process."""

    latest = 0


def _counting(change: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(change)
    def counted(*args: Any, **named: Any) -> Any:
        # Drawn, not added: of two threads that change dicts, neither hides the other.
        Changes.latest = next(_NUMBERS)
        return change(*args, **named)

    return counted


def _watched(cls: _DICT) -> _DICT:
    """Let every method that changes a dict count."""
    for name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem"):
        setattr(cls, name, _counting(getattr(cls, name)))
    for name in ("setdefault", "update"):
        setattr(cls, name, _counting(getattr(cls, name)))
    return cls


@_watched
class WatchedEntry(dict[str, Tensor]):
    """State of one parameter."""

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Pickle and copy as a plain dict."""
        return dict, (dict(self),)


@_watched
class WatchedState(defaultdict[Any, dict[str, Any]]):
    """State by parameter."""

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Pickle and copy as a plain dict with the same default."""
        return defaultdict, (dict,), None, None, iter(self.items())
