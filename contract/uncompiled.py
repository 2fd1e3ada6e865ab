"""Steps that torch.compile leaves as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(step: Callable[P, T]) -> Callable[P, T]:
    """A step that is called where a compiled loop calls it, and not traced: a graph break."""
    return cast("Callable[P, T]", torch._disable_dynamo(step))  # type: ignore[attr-defined]
