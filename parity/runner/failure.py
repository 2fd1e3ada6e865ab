"""The one format in which a failure is reported.

adamw_step[my_adamw, bf16, replay] breaks `value`: exp_avg_sqs[0][0] differs from the reference
  got      0.00099998713  0x3a831200
  want     0.00099999993  0x3a83126e   accepted 0x3a83126c to 0x3a831270
  distance 110 ULP = 36.7 x bound
  inputs   params 0.0  0x00000000   grads 1.0  0x3f80   ...
  controls lr=0.0037 beta1=0.5 ...   options bias_correction=True
  case     list of 1 tensor, 1 element (shrunk from 5 tensors, 4097 elements; regime mixture)
  repro    python repro_8c1f9e.py
"""

from __future__ import annotations

from dataclasses import dataclass

from twinstep.parity.cases.case import Case
from twinstep.parity.expected.ulp import hex_bits
from twinstep.parity.laws.finding import Finding, shown
from twinstep.parity.registry.kernels import Kernel


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A broken law, ready to be reported.

    Attributes:
        kernel: that broke it.
        engine: it ran on.
        law: its name.
        case: the smallest case found.
        original: the case it was found in.
        finding: what is wrong there.
        repro: path of the stand-alone file, or empty.
    """

    kernel: Kernel
    engine: str
    law: str
    case: Case
    original: Case
    finding: Finding
    repro: str = ""

    def headline(self) -> str:
        """Kernel, law and place in one line."""
        head = f"{self.kernel.operation.name}[{self.kernel.name}, {self.case.combination}, "
        head += f"{self.engine}] breaks `{self.law}`: "
        place = self.finding.where()
        return head + (f"{place} " if place and self.finding.place >= 0 else "") + self._says()

    def _says(self) -> str:
        named = self.finding.name and self.finding.place < 0
        control = named and self.finding.name in self.case.controls
        return f"{self.finding.name} {self.finding.says}" if control else self.finding.says

    def text(self) -> str:
        """The whole failure text."""
        lines = [self.headline(), *self._values(), *self._inputs(), f"  case     {self._sizes()}"]
        if self.repro:
            lines.append(f"  repro    python {self.repro}")
        return "\n".join(lines)

    def _values(self) -> list[str]:
        finding = self.finding
        if finding.got is None or finding.want is None:
            return []
        want = f"  want     {shown(finding.want)}"
        if finding.low is not None and finding.high is not None:
            want += f"   accepted {hex_bits(finding.low)} to {hex_bits(finding.high)}"
        distance = f"  distance {finding.distance()}"
        return [f"  got      {shown(finding.got)}", want, distance]

    def _inputs(self) -> list[str]:
        case, lines = self.case, []
        if self.finding.inputs:
            shown_inputs = [f"{name} {shown(x)}" for name, x in self.finding.inputs.items()]
            lines.append("  inputs   " + "   ".join(shown_inputs))
        settings = [f"{name}={value.item():.9g}" for name, value in case.controls.items()]
        settings += [f"{name}={value}" for name, value in case.options.items()]
        return [*lines, "  controls " + " ".join(settings)] if settings else lines

    def _sizes(self) -> str:
        return f"{_extent(self.case)} (shrunk from {_extent(self.original)}; {self._origin()})"

    def _origin(self) -> str:
        recipe = self.original.recipe
        return f"{recipe.layout} layout, regime {recipe.regime}, seed {recipe.seed}"


def _extent(case: Case) -> str:
    if not case.operation.lists:
        return "controls only"
    tensors = f"{case.length} tensor{'' if case.length == 1 else 's'}"
    return f"{tensors}, {case.numel} element{'' if case.numel == 1 else 's'}"
