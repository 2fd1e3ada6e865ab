"""LAMB parameter by parameter: gradients, copies and norms that are given, and clipping one by one.

A row is a parameter with a gradient. Rows that share a factor take their launches together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from twinstep.contract.hyper import Number
from twinstep.contract.shards import waited
from twinstep.contract.wrapper import ParamGroup

Given = Sequence[Tensor | None] | Sequence[Sequence[Tensor | None]]
Norms = Sequence[Sequence[Number]]


@dataclass(frozen=True, eq=False)
class Row:
    """One parameter with a gradient, and everything that belongs to it."""

    place: int
    index: int
    group: ParamGroup
    param: Tensor
    grad: Tensor
    copy: Tensor | None
    norm: Number | None

    @property
    def clips(self) -> bool:
        """True if the gradient has a factor of its own."""
        return clips(self.group)


def clips(group: ParamGroup) -> bool:
    """True if gradients of a group may be clipped; what a tensor holds, the device knows."""
    limit = cast(Number, group["max_grad_norm"])
    return isinstance(limit, Tensor) or limit > 0


def rows_of(
    groups: Sequence[ParamGroup], grads: Given | None, copies: Given | None, norms: Norms | None
) -> Iterator[Row]:
    """Yield a row for each parameter that has a gradient or is given one, in order.

    Raises:
        ValueError: a list is not as long as its group.
    """
    params = [cast("list[Tensor]", group["params"]) for group in groups]
    sizes = list(map(len, params))
    chosen = _by_group("grads", grads, sizes)
    outputs = _by_group("output_params", copies, sizes)
    place = 0
    for index, group in enumerate(groups):
        for slot, param in enumerate(params[index]):
            grad = chosen[index][slot]
            if grad is None:
                grad = param.grad
            if grad is not None:
                norm = None if norms is None else norms[index][slot]
                copy = outputs[index][slot]
                yield Row(place, index, group, param, waited(grad), copy, norm)
                place += 1


def batches(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield rows that one call of the kernels takes, in order."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        own = row.place if row.clips else None
        key = (row.index, row.param.device, row.copy is None, own)
        found.setdefault(key, []).append(row)
    yield from found.values()


def _by_group(name: str, given: Given | None, sizes: list[int]) -> list[list[Tensor | None]]:
    """Return one list for each group, of None where nothing was given.

    Raises:
        ValueError: a list is not as long as its group.
    """
    if given is None:
        return [[None] * size for size in sizes]
    flat = all(entry is None or isinstance(entry, Tensor) for entry in given)
    groups = [given] if flat else given
    lists = [list(cast("Sequence[Tensor | None]", group)) for group in groups]
    found = [len(group) for group in lists]
    if found != sizes:
        raise ValueError(
            f"{name} has {found} tensors per group, but should have {sizes} [FusedLamb.step]"
        )
    return lists
