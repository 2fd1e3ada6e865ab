"""The one format in which a failure is reported.

adamw_step[my_adamw, bf16, replay] breaks `value`: exp_avg_sqs[0][0] differs from the reference
  got      0.00099998713  0x3a831200
  want     0.00099999993  0x3a83126e   accepted 0x3a83126c to 0x3a831270
  distance 110 ULP = 36.7 x bound
  differ   4097 of 4097 in exp_avg_sqs, in the case that was found
  inputs   params 0.0  0x00000000   grads 1.0  0x3f80   ...
  controls lr=0.0037 beta1=0.5 ...
  options  bias_correction=True
  case     1 tensor, 1 element (shrunk from 5 tensors, 4097 elements; list layout, ...)
  cause    1 - beta is formed in fp32, where it loses digits: it gives all 4097 elements
  repro    .venv/bin/python parity_repros/repro_my_adamw_value_bf16.py
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from twinstep.parity.cases.case import Case
from twinstep.parity.expected.ulp import decimal, hex_bits
from twinstep.parity.laws.finding import Finding, shown
from twinstep.parity.operations.operation import Role
from twinstep.parity.records.standalone import command_for
from twinstep.parity.registry.kernels import Kernel

WIDTH = 100
FEW = 6
# Dtypes of a mixed list that are named.
MIXED = 8
TIED = "\0"


class Recorded(TypedDict):
    """Fields of a ledger's cell that a failure fills."""

    failure: str
    fatal: str
    kind: str
    wrong: tuple[str, ...]
    cause: str
    like: str
    repro: str


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A broken law, ready to be reported.

    Attributes:
        kernel: that broke it.
        engine: that it was meant for.
        law: its name.
        case: the smallest case found.
        original: the case it was found in.
        finding: what is wrong there.
        wrong: arguments whose values are wrong, or the exception and its place.
        cause: the known mistake that gives the kernel's values, if there is one.
        like: the law whose failure, of the same kernel and dtypes, has the same cause.
        differ: how many elements are wrong in the case it was found in.
        again: how the repro file fails, where that needs a word, or why there is none.
        repro: path of the stand-alone file, or empty.
        ran: the engine that it ran on, if another one.
    """

    kernel: Kernel
    engine: str
    law: str
    case: Case
    original: Case
    finding: Finding
    wrong: tuple[str, ...] = ()
    cause: str = ""
    like: str = ""
    differ: str = ""
    again: str = ""
    repro: str = ""
    ran: str = ""

    def headline(self) -> str:
        """Kernel, law and place in one line."""
        head = f"{self.kernel.operation.name}[{self.kernel.name}, {self.case.combination}, "
        head += f"{self.ran or self.engine}] breaks `{self.law}`: "
        place = self.finding.where()
        return head + (f"{place} " if place and self.finding.place >= 0 else "") + self._says()

    def _says(self) -> str:
        named = self.finding.name and self.finding.place < 0
        control = named and self.finding.name in self.case.controls
        return f"{self.finding.name} {self.finding.says}" if control else self.finding.says

    @property
    def called(self) -> Case:
        """Arguments of the call that is wrong; a law may make others too."""
        return self.finding.case or self.case

    def record(self) -> Recorded:
        """Fields of the ledger's cell."""
        return Recorded(
            failure=self.text(),
            fatal=self.finding.fatal,
            kind=self.finding.sort,
            wrong=self.wrong,
            cause=self.cause,
            like=self.like,
            repro=self.repro,
        )

    def text(self) -> str:
        """The whole failure text."""
        case = self.called
        rows = [
            *self._values(),
            ("differ", self._differ()),
            *self._inputs(),
            ("controls", _settings({k: decimal(v) for k, v in case.controls.items()})),
            ("options", _settings({k: str(v) for k, v in case.options.items()})),
            ("layout", _layout(case)),
            ("dtypes", _dtypes(case, self.original)),
            ("call", f"number {self.finding.call + 1} of the law" * (self.finding.call > 0)),
            ("case", self._sizes()),
            ("cause", self.cause),
            ("again", self.again),
        ]
        lines = [self.headline(), *(_line(name, text) for name, text in rows if text)]
        if self.repro:
            lines.append(f"  repro    {command_for(self.repro)}")
        return "\n".join(lines)

    def _values(self) -> list[tuple[str, str]]:
        finding = self.finding
        if finding.got is None or finding.want is None:
            return []
        want = shown(finding.want)
        if finding.low is not None and finding.high is not None:
            want += f"   accepted {hex_bits(finding.low)} to {hex_bits(finding.high)}"
        return [("got", shown(finding.got)), ("want", want), ("distance", finding.distance())]

    def _differ(self) -> str:
        found = self.differ and self.case is not self.original
        return self.differ + ", in the case that was found" * bool(found)

    def _inputs(self) -> list[tuple[str, str]]:
        """Elements at the place that is wrong; whole tensors where no single place decides."""
        if self.finding.inputs:
            return [
                ("inputs", "   ".join(f"{n} {shown(x)}" for n, x in self.finding.inputs.items()))
            ]
        case, written = self.called, self.called.operation.lists_of(Role.OUTPUT)
        return [
            (name, _together([_summary(tensor) for tensor in tensors[:3]]) + _more(tensors))
            for name, tensors in case.lists.items()
            if tensors and name not in written
        ]

    def _sizes(self) -> str:
        if self.case is self.original:
            return f"{_extent(self.case)} ({self._origin()})"
        return f"{_extent(self.case)} (shrunk from {_extent(self.original)}; {self._origin()})"

    def _origin(self) -> str:
        recipe = self.original.recipe
        return f"{recipe.layout} layout, regime {recipe.regime}, seed {recipe.seed}"


def _line(name: str, text: str) -> str:
    """A named line; it goes on below itself where it is long."""
    filled = textwrap.fill(
        text,
        WIDTH,
        initial_indent=f"  {name:8} ",
        subsequent_indent=" " * 11,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace(TIED, " ")


def _together(phrases: Sequence[str]) -> str:
    """Phrases side by side; none is broken between two lines."""
    return "   ".join(phrase.replace(" ", TIED) for phrase in phrases)


def _settings(values: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _layout(case: Case) -> str:
    """What makes tensors lie otherwise than one behind the other, aligned and flat."""
    said = ["weights require gradients"] * bool(case.leaves)
    lead = next(iter(case.lists), "")
    for name, tensors in case.lists.items():
        shapes = [tuple(tensor.shape) for tensor in tensors if tensor.dim() != 1]
        moved = [skew for skew in case.skews.get(name, ()) if skew]
        strides = [found for t in tensors if (found := case.storage.strides(name, t))]
        if strides:
            order = "columns" if case.storage.columns else "rows"
            said.append(f"{name} {_listed(shapes)} by {order}, strides {_listed(strides)}")
        elif shapes and name == lead:
            said.append(f"shapes {_listed(shapes)}")
        if moved:
            said.append(f"{name} {_listed(moved)} elements off alignment")
    return "; ".join(said)


def _dtypes(case: Case, drawn: Case) -> str:
    """Dtypes of the lists that have several; of what is left of them, where they had."""

    def of(tensors: Sequence[Tensor]) -> list[str]:
        return [str(tensor.dtype)[6:] for tensor in tensors]

    mixed = [name for name, tensors in drawn.lists.items() if len(set(of(tensors))) > 1]
    return "; ".join(
        f"{name} {' '.join(of(case.lists[name][:MIXED]))}" + _more(case.lists[name], MIXED)
        for name in mixed
        if case.lists.get(name)
    )


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values[:2])) + (", ..." if len(values) > 2 else "")


def _summary(tensor: Tensor) -> str:
    """A tensor in one phrase: its elements if they are few, otherwise what stands out."""
    flat = tensor.reshape(-1)
    if flat.numel() <= FEW:
        return "[" + " ".join(decimal(x) for x in flat) + "]"
    wide = flat.double()
    finite = wide[torch.isfinite(wide)]
    peak = f"largest {finite.abs().max().item():.3g}" if finite.numel() else "none finite"
    wild = flat.numel() - finite.numel()
    return f"[{flat.numel()} elements, {peak}{f', {wild} not finite' if wild else ''}]"


def _more(tensors: Sequence[Tensor], said: int = 3) -> str:
    count = len(tensors) - said
    return f"   and {count} more" if count > 0 else ""


def _extent(case: Case) -> str:
    if not case.operation.lists:
        return "controls only"
    tensors = f"{case.length} tensor{'' if case.length == 1 else 's'}"
    return f"{tensors}, {case.numel} element{'' if case.numel == 1 else 's'}"
