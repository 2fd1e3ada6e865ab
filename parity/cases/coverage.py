"""What the cases of one cell show, by number, for the ledger."""

from __future__ import annotations

from collections import Counter

from twinstep.parity.cases.case import Case
from twinstep.parity.cases.covering import size_class
from twinstep.parity.cases.regimes import FINITE
from twinstep.parity.operations.operation import Operation

NUMBERS = ("none", "tiny", "vector", "block", "large")


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
        self.flags: Counter[str] = Counter()
        self.values: dict[str, Counter[str]] = {}
        self.pairs: set[tuple[str, str]] = set()
        self.triples: set[tuple[str, str, str, str]] = set()

    def add(self, case: Case) -> None:
        """Count one case."""
        self.cases += 1
        self.regimes.update({regime for regime, _ in case.seen})
        lead = max(case.lists.values(), key=len, default=())
        self.sizes.update(size_class(tensor.numel()) for tensor in lead)
        recipe = case.recipe
        flags = {
            f"layout {recipe.layout}": bool(case.lists),
            "planes": recipe.planes,
            "one step": recipe.one_step,
            "absent lists": recipe.absent,
            "off alignment": any(any(skews) for skews in case.skews.values()),
        }
        self.flags.update(name for name, is_so in flags.items() if is_so)
        settings = {
            **{name: f"{value.item():g}" for name, value in case.controls.items()},
            **{name: str(value) for name, value in case.options.items()},
        }
        for name, value in settings.items():
            self.values.setdefault(name, Counter())[value] += 1
            self.triples |= {(*pair, name, value) for pair in case.seen}
        self.pairs |= case.seen

    def numbers(self) -> dict[str, object]:
        """The counts as plain data; pairs and triples also as a share of all there are."""
        found: dict[str, object] = {"cases": self.cases}
        if self.operation.lists:
            pairs = len(FINITE) * len(NUMBERS[1:])
            here = [pair for pair in self.pairs if pair[0] in FINITE and pair[1] != "none"]
            declared = {
                *((row.name, f"{x:g}") for row in self.operation.controls for x in row.values),
                *((row.name, str(x)) for row in self.operation.options for x in row.choices),
            }
            values = len(declared)
            finite = [
                row
                for row in self.triples
                if row[0] in FINITE and row[1] != "none" and row[2:] in declared
            ]
            found |= {"regimes": dict(self.regimes), "sizes": dict(self.sizes)}
            found |= {"flags": dict(self.flags)}
            found |= {"regime x size": [len(here), pairs]}
            found |= {"regime x size x setting": [len(finite), pairs * values]}
        found["settings"] = {name: dict(counts) for name, counts in self.values.items()}
        return found
