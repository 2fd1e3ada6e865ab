"""One kernel of the corpus: its launch, its inputs, and its result stated a second time.

A case is written next to its kernel:

    @case(double, "x: *fp32, n: i32", constants={"BLOCK": 128}, grid=(2,))
    def doubled(draw: Draw) -> Run:
        x = draw.reals(200)
        return Run({"x": x, "n": 200}, {"x": 2 * x})

The statement is PyTorch, NumPy or Python integers; it never runs a kernel. Integers and single
IEEE operations are wanted bit for bit. Where a kernel rounds in an order or with an approximation
of its own, the want is a `Near`: float64 values with an error bound and the reason for it.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

ALL_SM = (80, 90, 100)
"""Compute capabilities that the corpus is compiled for."""

ULP = 2.0**-23
"""Distance of fp32 numbers relative to their size, at most; half of it bounds one rounding."""


@dataclass(frozen=True)
class Near:
    """Wanted values with the error that an honest kernel may make.

    Attributes:
        values: float64.
        error: Largest absolute error, float64, of the same shape.
        why: Where it comes from.
    """

    values: Tensor
    error: Tensor
    why: str


Argument = Tensor | int | float | tuple[Tensor, ...]
Want = Tensor | Near


@dataclass
class Run:
    """One launch: arguments by name and what the written ones must hold afterwards.

    Arguments without a want must come back unchanged. A tuple of tensors is passed as a table of
    their addresses; its tensors are wanted as "name[i]".
    """

    arguments: dict[str, Argument]
    wants: dict[str, Want]


class Draw:
    """Reproducible inputs."""

    def __init__(self, name: str) -> None:
        self.random = np.random.default_rng(zlib.crc32(name.encode()))

    def reals(self, *shape: int, low: float = -4.0, high: float = 4.0) -> Tensor:
        """fp32, uniform."""
        values = self.random.uniform(low, high, shape).astype(np.float32)
        return torch.tensor(values)

    def doubles(self, *shape: int, low: float = -4.0, high: float = 4.0) -> Tensor:
        """float64, uniform."""
        return torch.tensor(self.random.uniform(low, high, shape))

    def integers(
        self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32
    ) -> Tensor:
        """Integers of [low, high)."""
        return torch.tensor(self.random.integers(low, high, shape, dtype=np.int64)).to(dtype)

    def patterns(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Uniform bit patterns of a 16 or 32 bit dtype, non-finite numbers included."""
        narrow = dtype.itemsize == 2
        words = self.random.integers(0, 1 << (16 if narrow else 32), shape, dtype=np.int64)
        return torch.tensor(words).to(torch.int16 if narrow else torch.int32).view(dtype)


Statement = Callable[[Draw], Run]


@dataclass(frozen=True)
class Case:
    """One kernel with its launch geometry and its statement.

    Attributes:
        name: Of the statement; unique in the corpus.
        kernel: The jitted function, or the name of an entry of a CUDA C++ source.
        source: File of the CUDA C++ source within `cuda/`; "" for Triton.
        signature: Argument name to Triton type, in order; C++ entries name their own types.
        constants: Compile-time arguments.
        grid: Blocks.
        block: Threads of a block; for Triton 32 times the warps.
        options: Compiler options.
        unaligned: Pointers of which the compiler is not told that they are multiples of 16.
        sms: Compute capabilities.
        statement: Inputs and wanted outputs.
    """

    name: str
    kernel: object
    source: str
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    grid: tuple[int, ...]
    block: tuple[int, ...]
    options: Mapping[str, object]
    unaligned: tuple[str, ...]
    sms: tuple[int, ...]
    statement: Statement = field(repr=False)

    def run(self) -> Run:
        """Fresh inputs and wants; the same ones each time."""
        return self.statement(Draw(self.name))


CASES: dict[str, Case] = {}


def signature_of(text: str) -> dict[str, str]:
    """Read "name: type, name: type"."""
    return dict(re.findall(r"(\w+)\s*:\s*([^,]+?)\s*(?:,|$)", text))


def case(
    kernel: object,
    signature: str,
    *,
    constants: Mapping[str, object] | None = None,
    grid: tuple[int, ...] = (1,),
    warps: int = 4,
    unaligned: tuple[str, ...] = (),
    sms: tuple[int, ...] = ALL_SM,
    fused: bool = True,
) -> Callable[[Statement], Statement]:
    """Enter a Triton kernel into the corpus; `fused` lets the compiler contract a*b + c."""
    options = {"num_warps": warps, "enable_fp_fusion": fused}

    def enter(statement: Statement) -> Statement:
        _enter(
            Case(
                _name(statement),
                kernel,
                "",
                signature_of(signature),
                constants or {},
                grid,
                (32 * warps,),
                options,
                unaligned,
                sms,
                statement,
            )
        )
        return statement

    return enter


def cuda_case(
    source: str,
    kernel: str,
    arguments: str,
    *,
    grid: tuple[int, ...] = (1,),
    block: tuple[int, ...] = (128,),
    options: Mapping[str, object] | None = None,
    sms: tuple[int, ...] = ALL_SM,
) -> Callable[[Statement], Statement]:
    """Enter a CUDA C++ kernel; `arguments` names them in order, with their types."""

    def enter(statement: Statement) -> Statement:
        names = signature_of(arguments)
        name = _name(statement)
        _enter(
            Case(name, kernel, source, names, {}, grid, block, options or {}, (), sms, statement)
        )
        return statement

    return enter


def _name(statement: Statement) -> str:
    return str(getattr(statement, "__name__", statement))


def _enter(new: Case) -> None:
    old = CASES.get(new.name)
    if old is not None and old.statement.__module__ != new.statement.__module__:
        raise ValueError(f"The corpus has two cases named {new.name}.")
    CASES[new.name] = new


def rounded(values: Tensor, steps: float, why: str, floor: float = 2.0**-126) -> Near:
    """A `Near` of so many half ULPs of fp32 relative to the value, plus some smallest numbers."""
    values = values.double()
    return Near(values, values.abs() * (steps * ULP / 2) + floor, why)


def summed(values: Tensor, sizes: Tensor, terms: int, why: str) -> Near:
    """A sum of fp32 terms in any order: each addition rounds at most the sum of magnitudes."""
    return Near(values.double(), sizes.double() * (terms * ULP / 2), why)
