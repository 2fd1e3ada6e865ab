"""Two answers compared bit for bit.

Equal means the same bits; the sign of zero counts, a NaN equals every NaN. Nothing is tolerated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from twinstep.parity.expected.ulp import same
from twinstep.parity.laws.finding import Finding, element, shown
from twinstep.scenarios.calls import Value, Written


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first element of one tensor in which two answers differ, and how many do.

    Attributes:
        where: step, operation, layout, argument, parameter and element.
        says: what differs, in a few words, without the values.
        index: flat index of the element; 0 if dtype or number of elements differ.
        count: how many elements differ.
        got: what the fast side wrote there, 0-dim; None if there is no such element.
        want: what the reference wrote there.
    """

    where: str
    says: str
    index: int
    count: int
    got: Tensor | None = None
    want: Tensor | None = None

    def __str__(self) -> str:
        headline = f"{self.where} {self.says}"
        if self.got is None or self.want is None:
            return headline
        finding = Finding(says=self.says, call=0, got=self.got, want=self.want)
        return (
            f"{headline}\n  got      {shown(self.got)}\n  want     {shown(self.want)}"
            f"\n  distance {finding.distance()}"
        )


def tensor_difference(where: str, want: Tensor, got: Tensor) -> Difference | None:
    """The first difference between two tensors, or None.

    Args:
        where: names the tensor in the report.
        want: what the reference wrote.
        got: what the fast side wrote; another dtype or number of elements differs as a whole.
    """
    if want.dtype != got.dtype or want.numel() != got.numel():
        says = f"has {got.numel()} {got.dtype}, but should have {want.numel()} {want.dtype}"
        return Difference(where=where, says=says, index=0, count=max(want.numel(), 1))
    differs = ~same(got.detach().reshape(-1), want.detach().reshape(-1))
    count = int(differs.sum())
    if not count:
        return None
    index = int(differs.int().argmax())
    return Difference(
        where=f"{where}[{index}]" if want.dim() else where,
        says=f"differs from the reference, {count} of {want.numel()} elements do",
        index=index,
        count=count,
        got=element(got, index),
        want=element(want, index),
    )


def value_differences(
    where: str, want: Value, got: Value, names: Sequence[str] = ()
) -> Iterator[Difference]:
    """Every tensor of one argument that differs; `names` label the tensors of a list."""
    if isinstance(want, Tensor) or isinstance(got, Tensor):
        pairs = [(where, want, got)]
    else:
        labels = names if len(names) == len(want) else [str(index) for index in range(len(want))]
        pairs = [
            (f"{where}[{label}]", ours, theirs)
            for label, ours, theirs in zip(labels, want, got, strict=True)
        ]
    for label, ours, theirs in pairs:
        assert isinstance(ours, Tensor)
        assert isinstance(theirs, Tensor)
        found = tensor_difference(label, ours, theirs)
        if found is not None:
            yield found


def written_differences(
    where: str, want: Written, got: Written, names: Sequence[str] = ()
) -> list[Difference]:
    """Every written tensor in which two answers to one call differ."""
    return [
        found
        for name, value in want.items()
        for found in value_differences(f"{where} {name}", value, got[name], names)
    ]


def elements(written: Written) -> int:
    """How many elements an answer holds."""
    values = (v if isinstance(v, list) else [v] for v in written.values())
    return sum(tensor.numel() for value in values for tensor in value)
