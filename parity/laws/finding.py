"""The finding of a check: one place, with what was there and what should have been."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from twinstep.parity.cases.guarded_memory import GuardedMemory, Span
from twinstep.parity.expected.ulp import decimal, hex_bits, ulp_distance


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One violation.

    Attributes:
        says: what is wrong, in a few words, without the values.
        call: index of the call of the plan it was found in.
        name: of the argument; empty if the call itself failed.
        index: of the tensor in its list.
        place: flat index of the element, -1 if it is none.
        got: the element as a 0-dim tensor.
        want: what it should have been.
        low: smallest accepted value, if not `want` alone.
        high: largest accepted value.
        ratio: error over bound, 0 if there is no bound.
        inputs: the elements of all lists at this place, by name.
        failure: exception and the innermost frames, if the call raised.
        fatal: kind of a failure after which there is no use in going on; empty for any other.
    """

    says: str
    call: int
    name: str = ""
    index: int = 0
    place: int = -1
    got: Tensor | None = None
    want: Tensor | None = None
    low: Tensor | None = None
    high: Tensor | None = None
    ratio: float = 0.0
    inputs: dict[str, Tensor] = field(default_factory=dict)
    failure: str = ""
    fatal: str = ""

    def where(self) -> str:
        """The element, as one would write it in Python."""
        if not self.name:
            return ""
        return self.name if self.place < 0 else f"{self.name}[{self.index}][{self.place}]"

    def distance(self) -> str:
        """Distance between `got` and `want`, in words."""
        if self.got is None or self.want is None:
            return ""
        if self.got.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            return f"off by {int(self.got.item()) - int(self.want.item())}"
        steps = int(ulp_distance(self.got, self.want).item())
        if steps < 0:
            return "one is NaN"
        if steps == 0 and hex_bits(self.got) != hex_bits(self.want):
            return "the sign of zero"
        bound = f" = {self.ratio:.3g} x bound" if self.ratio else ""
        return f"{steps} ULP{bound}"


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
        elif beside and other.value.numel() == 1 and other.value.dim() == 0:
            found[other.name] = other.value
    return found
