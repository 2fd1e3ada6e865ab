"""Errors that a training loop may want to catch by name."""


class MinimumLossScale(RuntimeError):
    """Gradients overflow although the loss scale is at its floor."""


def in_words(value: object) -> str:
    """A value for one line of a message; tensors and whatever is long are named by their class."""
    kind = f"a {type(value).__name__}"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"{kind} of {value.bit_length()} bits"
    if not isinstance(value, bool | int | float | str | list | tuple | None):
        return kind
    line = repr(value)
    return kind if "\n" in line or len(line) > 60 else line
