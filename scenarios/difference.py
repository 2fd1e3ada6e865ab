"""Two answers compared bit for bit.

Equal means the same bits; the sign of zero counts, a NaN equals every NaN. Nothing is tolerated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from parity.ulp import decimal, hex_bits, same
from scenarios.calls import Value, Written


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first element of one tensor in which two sides differ, and how many do."""

    where: str
    index: int
    count: int
    numel: int
    reference: str
    fast: str

    def __str__(self) -> str:
        return (
            f"{self.where}[{self.index}]: {self.count} of {self.numel} elements differ\n"
            f"  reference {self.reference}\n  fast      {self.fast}"
        )


def shown(tensor: Tensor, index: int) -> str:
    """One element in decimal and in bits, such as `0.1  0x3dcccccd`."""
    element = tensor.detach().reshape(-1)[index]
    return f"{decimal(element)}  {hex_bits(element)}"


def tensor_difference(where: str, reference: Tensor, fast: Tensor) -> Difference | None:
    """The first difference between two tensors, or None.

    Args:
        where: names the tensor in the report.
        reference: what should be.
        fast: what is; another dtype or number of elements is a difference of every element.
    """
    if reference.dtype != fast.dtype or reference.numel() != fast.numel():
        return Difference(
            where=where,
            index=0,
            count=max(reference.numel(), 1),
            numel=reference.numel(),
            reference=f"{reference.dtype} of {reference.numel()}",
            fast=f"{fast.dtype} of {fast.numel()}",
        )
    differs = ~same(fast.detach().reshape(-1), reference.detach().reshape(-1))
    count = int(differs.sum())
    if not count:
        return None
    index = int(differs.int().argmax())
    return Difference(
        where=where,
        index=index,
        count=count,
        numel=reference.numel(),
        reference=shown(reference, index),
        fast=shown(fast, index),
    )


def value_differences(
    where: str, reference: Value, fast: Value, names: Sequence[str] = ()
) -> Iterator[Difference]:
    """Every tensor of one argument that differs; `names` label the tensors of a list."""
    if isinstance(reference, Tensor) or isinstance(fast, Tensor):
        pairs = [(where, reference, fast)]
    else:
        labels = names if len(names) == len(reference) else [str(i) for i in range(len(reference))]
        pairs = [
            (f"{where}[{label}]", ours, theirs)
            for label, ours, theirs in zip(labels, reference, fast, strict=True)
        ]
    for label, ours, theirs in pairs:
        assert isinstance(ours, Tensor)
        assert isinstance(theirs, Tensor)
        found = tensor_difference(label, ours, theirs)
        if found is not None:
            yield found


def written_differences(
    where: str, reference: Written, fast: Written, names: Sequence[str] = ()
) -> list[Difference]:
    """Every written tensor in which two answers to one call differ."""
    return [
        found
        for name, value in reference.items()
        for found in value_differences(f"{where} {name}", value, fast[name], names)
    ]


def elements(written: Written) -> int:
    """How many elements an answer holds."""
    values = (v if isinstance(v, list) else [v] for v in written.values())
    return sum(tensor.numel() for value in values for tensor in value)
