"""Coverage by the cases of one cell, in numbers, for the ledger."""

from __future__ import annotations

from collections import Counter

import torch

from twinstep.parity.cases.case import Case
from twinstep.parity.cases.covering import size_class
from twinstep.parity.cases.regimes import FINITE
from twinstep.parity.operations.operation import Control, Operation, Role

NUMBERS = ("none", "tiny", "vector", "block", "large")
DRAWN = "drawn"


class Coverage:
    """Counts over the cases of one cell.

    Args:
        operation: whose cases they are.
    """

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.cases = 0
        self.regimes: Counter[str] = Counter()
        self.sizes: Counter[str] = Counter()
        self.matrices: Counter[str] = Counter()
        self.flags: Counter[str] = Counter()
        self.values: dict[str, Counter[str]] = {}
        self.pairs: set[tuple[str, str]] = set()
        self.triples: set[tuple[str, str, str, str]] = set()
        self.overflows: set[tuple[str, str]] = set()
        self._declared = {
            **{row.name: {_text(row, x) for x in row.values} for row in operation.controls},
            **{row.name: {str(x) for x in row.choices} for row in operation.options},
        }

    def add(self, case: Case) -> None:
        """Count one case."""
        self.cases += 1
        self.regimes.update({regime for regime, _ in case.seen})
        lead = max(case.lists.values(), key=len, default=())
        self.sizes.update(size_class(tensor.numel()) for tensor in lead)
        every = (
            [t.shape for t in row if t.dim() == 2 and t.numel()] for row in case.lists.values()
        )
        shapes = max(every, key=len, default=[])
        self.matrices.update(" x ".join(map(extent, shape)) for shape in shapes)
        recipe = case.recipe
        flags = {
            f"layout {recipe.layout}": bool(case.lists),
            f"dims {recipe.dims}": bool(case.lists),
            "weights require grad": any(case.lists[name] for name in case.leaves),
            "one step": recipe.one_step,
            "absent lists": recipe.absent,
            "off alignment": any(any(skews) for skews in case.skews.values()),
        }
        self.flags.update(name for name, is_so in flags.items() if is_so)
        settings = {
            **{row.name: _text(row, case.controls[row.name]) for row in self.operation.controls},
            **{name: str(value) for name, value in case.options.items()},
        }
        overflow = overflows(case)
        for name, value in settings.items():
            listed = value if value in self._declared[name] else DRAWN
            self.values.setdefault(name, Counter())[listed] += 1
            if listed != DRAWN:
                self.triples |= {(*pair, name, value) for pair in case.seen}
                self.overflows |= {(name, value)} if overflow else set()
        self.pairs |= case.seen

    def numbers(self) -> dict[str, object]:
        """The counts as plain data; pairs and triples also as a share of all there are."""
        found: dict[str, object] = {"cases": self.cases}
        if self.operation.lists:
            pairs = len(FINITE) * len(NUMBERS[1:])
            here = [pair for pair in self.pairs if pair[0] in FINITE and pair[1] != "none"]
            values = sum(map(len, self._declared.values()))
            finite = [row for row in self.triples if row[0] in FINITE and row[1] != "none"]
            found |= {"regimes": dict(self.regimes), "sizes": dict(self.sizes)}
            found |= {"flags": dict(self.flags), "matrices": dict(self.matrices)}
            found |= {"regime x size": [len(here), pairs]}
            found |= {"regime x size x setting": [len(finite), pairs * values]}
        found["settings"] = {name: dict(counts) for name, counts in self.values.items()}
        read = {name: x for name, x in self._declared.items() if name not in self._decided()}
        if self.overflows and read:
            here = [pair for pair in self.overflows if pair[0] in read]
            found["overflow x setting"] = [len(here), sum(map(len, read.values()))]
        return found

    def _decided(self) -> set[str]:
        """Controls that an overflow has nothing to meet in: its own flag, and what is not read."""
        return {"found_inf", *(row.name for row in self.operation.controls if row.output)}


def extent(size: int) -> str:
    """The class of a number of rows or columns: 1, or that of a tensor of as many elements."""
    return "1" if size == 1 else size_class(size)


def overflows(case: Case) -> bool:
    """True if a flag that is read is up, or a gradient is not finite."""
    flags = [row for row in case.operation.controls if row.name == "found_inf" and not row.output]
    if any(case.controls[row.name].item() for row in flags):
        return True
    grads = [t for name in case.operation.lists_of(Role.GRAD) for t in case.lists[name]]
    return not all(bool(torch.isfinite(grad).all()) for grad in grads)


def _text(control: Control, value: float | torch.Tensor) -> str:
    """A value as the kernel gets it."""
    whole = int(value) if control.dtype == torch.int64 else value
    return str(torch.as_tensor(whole, dtype=control.dtype).item())
