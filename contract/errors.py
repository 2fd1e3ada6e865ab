"""Errors that a training loop may want to catch by name, and values in their sentences."""

from __future__ import annotations


class MinimumLossScale(RuntimeError):
    """The loss scale is at its floor and the gradients still overflow: training cannot go on."""


def in_words(value: object) -> str:
    """A value for one line of a message; tensors and whatever is long are named by their class.

    >>> in_words(2**70)
    'an int of 71 bits'
    """
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an int of {value.bit_length()} bits"
    plain = isinstance(value, bool | int | float | str | list | tuple | None)
    text = repr(value) if plain else "\n"
    return text if len(text) <= 60 and "\n" not in text else f"a {type(value).__name__}"
