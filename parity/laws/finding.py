"""The finding of a check: one place, with what was there and what should have been."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from twinstep.parity.cases.case import Case, is_counter
from twinstep.parity.cases.formats import FORMATS
from twinstep.parity.cases.guarded_memory import GuardedMemory, Span
from twinstep.parity.expected.ulp import decimal, hex_bits, ulp_distance

MEANINGFUL = 1e100
# Ends of a call, by the words with which the caller reports them.
ENDS = (
    ("raises OutOfBounds", "out of bounds"),
    ("raises Race", "race"),
    ("returns", "returns"),
)
# Kinds of violations, those first that say most about their cause.
KINDS = (
    "exit",
    "signal",
    "memory",
    "processes",
    "output",
    "hang",
    "compile",
    "out of bounds",
    "race",
    "stray write",
    "raises",
    "returns",
    "value",
    "formula",
    "skipped step",
    "dependence",
    "process state",
    "host read",
    "instruction",
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One violation: of many wrong elements that which is furthest off.

    Attributes:
        says: what is wrong, in a few words, without the values.
        call: index of the call of the plan it was found in.
        kind: one of `KINDS`; see `sort`.
        name: of the argument; empty if the call itself failed.
        index: of the tensor in its list.
        place: flat index of the element, -1 if it is none.
        got: the element as a 0-dim tensor.
        want: what it should have been.
        low: smallest accepted value, if not `want` alone.
        high: largest accepted value.
        ratio: error over bound, 0 if there is no bound.
        differ: number of wrong elements, and of all that were compared, by argument.
        inputs: the elements of all lists at this place, by name.
        failure: exception and the innermost frames, if the call raised.
        fatal: kind of a failure after which there is no use in going on; empty for any other.
        ends: places of a tensor of more than 2³¹ elements that are wrong.
        case: arguments of that call, which other calls of the plan need not share.
        written: everything that call wrote, by argument and index.
    """

    says: str
    call: int
    kind: str = ""
    name: str = ""
    index: int = 0
    place: int = -1
    got: Tensor | None = None
    want: Tensor | None = None
    low: Tensor | None = None
    high: Tensor | None = None
    ratio: float = 0.0
    differ: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    failure: str = ""
    fatal: str = ""
    ends: tuple[str, ...] = ()
    case: Case | None = None
    written: Mapping[tuple[str, int], Tensor] = field(default_factory=dict)

    @property
    def sort(self) -> str:
        """The kind of violation, one of `KINDS`."""
        if not self.failure or self.fatal:
            return self.fatal or self.kind or "instruction"
        return next((kind for words, kind in ENDS if self.failure.startswith(words)), "raises")

    def where(self) -> str:
        """The element, as one would write it in Python."""
        if not self.name:
            return ""
        return self.name if self.place < 0 else f"{self.name}[{self.index}][{self.place}]"

    def distance(self) -> str:
        """Distance between `got` and `want`, in words."""
        if self.got is None or self.want is None:
            return ""
        if self.place < 0 and {float(self.got), float(self.want)} == {0.0, 1.0}:
            return f"{decimal(self.got)}, should be {decimal(self.want)}"
        if self.got.dtype not in FORMATS:
            return f"off by {int(self.got.item()) - int(self.want.item())}"
        steps = int(ulp_distance(self.got, self.want).item())
        if steps < 0:
            return "one is NaN"
        if steps == 0 and hex_bits(self.got) != hex_bits(self.want):
            return "the sign of zero"
        return f"{steps} ULP{self._of_bound()}"

    def differing(self) -> str:
        """Number of wrong elements, in words; empty where there is but one element."""
        if sum(of for _, of in self.differ.values()) <= 1:
            return ""
        counts = [(name, wrong, of) for name, (wrong, of) in self.differ.items() if wrong]
        return ", ".join(f"{wrong} of {of} in {name}" for name, wrong, of in counts)

    def _of_bound(self) -> str:
        if not self.ratio:
            return ""
        # Without room on either side a ratio would be a division by zero.
        tight = self.low is not None and self.high is not None and bool(self.low == self.high)
        if tight and self.ratio > MEANINGFUL:
            return ", and the bound is 0"
        return f" = {self.ratio:.3g} x bound"


def shown(value: Tensor) -> str:
    """A value in decimal and bits."""
    return f"{decimal(value)}  {hex_bits(value)}"


def element(tensor: Tensor, place: int) -> Tensor:
    """One element as a 0-dim tensor of its own."""
    return tensor.reshape(-1)[place].clone()


def inputs_at(memory: GuardedMemory, span: Span, place: int) -> dict[str, Tensor]:
    """Values of all lists at this element before the call."""
    found = {}
    for other in memory.spans:
        beside = not other.control and not span.control and other.index == span.index
        if beside and other.value.numel() == span.value.numel() and place >= 0:
            found[other.name] = element(other.value, place)
        elif beside and is_counter(other.value):
            found[other.name] = other.value
    return found
