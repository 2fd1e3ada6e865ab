"""Lists of tensors that travel together: one entry per parameter, in one order."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def check_lengths(
    where: str,
    required: dict[str, Sequence[Tensor]],
    optional: dict[str, Sequence[Tensor]] | None = None,
) -> None:
    """Require lists of equal length and tensors of equal shape, index by index.

    Args:
        where: the operation, for the message.
        required: lists by name; all have the length of the first.
        optional: lists by name; each has that length or is empty.

    Raises:
        ValueError: a length or a shape differs.
    """
    first, *_ = required
    lead = required[first]
    given = {name: tensors for name, tensors in (optional or {}).items() if len(tensors)}
    for name, tensors in {**required, **given}.items():
        if len(tensors) != len(lead):
            raise ValueError(
                f"{name} has {len(tensors)} tensors, but should have {len(lead)} "
                f"like {first} [{where}]"
            )
        for index, (tensor, like) in enumerate(zip(tensors, lead, strict=True)):
            if tensor.shape != like.shape:
                raise ValueError(
                    f"{name}[{index}] has shape {tuple(tensor.shape)}, but should have "
                    f"{tuple(like.shape)} like {first}[{index}] [{where}]"
                )


def check_steps(where: str, steps: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    """Require one step counter per parameter.

    Raises:
        ValueError: there are more or fewer.
    """
    if len(steps) != len(params):
        raise ValueError(
            f"steps has {len(steps)} tensors, but should have {len(params)} like params [{where}]"
        )


def or_absent(tensors: Sequence[Tensor], length: int) -> Sequence[Tensor | None]:
    """Return the list itself, or None for every entry when the list is empty."""
    return tensors if len(tensors) else [None] * length


def unchanged(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies with the same bits: what a skipped step returns."""
    return [tensor.clone() for tensor in tensors]
