"""Errors that a training loop may want to catch by name."""

from __future__ import annotations


class MinimumLossScale(RuntimeError):
    """The loss scale is at its floor and the gradients still overflow: training cannot go on."""


def shown(value: object) -> str:
    """A value in a message: short and plain ones as they are, of others what they are."""
    if isinstance(value, int) and abs(value) >= 2**64:
        return "an int of more than 64 bits"
    plain = isinstance(value, bool | int | float | str | list | tuple | None)
    text = repr(value) if plain else "\n"
    return text if len(text) <= 60 and "\n" not in text else f"a {type(value).__name__}"
