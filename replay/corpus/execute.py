"""Runs one text of the corpus on replay and compares what it wrote with what was stated."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from twinstep.replay.corpus.case import CASES, Argument, Case, Near, Run, Want
from twinstep.replay.corpus.kernels import load
from twinstep.replay.corpus.store import Entry
from twinstep.replay.launch.options import allow
from twinstep.replay.launch.record import Launch
from twinstep.replay.launch.run import program_of, run_ptx

Parameter = Tensor | int | float | bytes


@dataclass(frozen=True)
class Outcome:
    """One execution.

    Attributes:
        launch: What replay counted.
        run: The arguments as the kernel left them.
        mismatches: One sentence for each tensor that does not hold what was stated.
    """

    launch: Launch
    run: Run
    mismatches: list[str]


def case_of(name: str) -> Case:
    """A case by its name; those of other projects must have been loaded."""
    load()
    return CASES[name]


def execute(entry: Entry, ptx: str) -> Outcome:
    """Run one text on fresh inputs and compare."""
    case = case_of(entry.case)
    run = case.run()
    before = {name: value.clone() for name, value in tensors_of(run).items()}
    parameters = [parameter(case, name, run.arguments[name]) for name in case.signature]
    # Triton appends pointers to scratch memory, null where none is needed.
    wanted = len(program_of(ptx, entry.kernel)[0].kernel.params)
    parameters += [0] * (wanted - len(parameters))
    with allow(*tensors_of(run).values()):
        launch = run_ptx(ptx, entry.kernel, case.grid, case.block, parameters, shared=entry.shared)
    return Outcome(launch, run, mismatches(run, before))


def tensors_of(run: Run) -> dict[str, Tensor]:
    """Every tensor of a launch, those behind tables under "name[index]"."""
    found: dict[str, Tensor] = {}
    for name, value in run.arguments.items():
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, tuple):
            found |= {f"{name}[{index}]": tensor for index, tensor in enumerate(value)}
    return found


def parameter(case: Case, name: str, value: Argument) -> Parameter:
    """An argument as the kernel takes it."""
    if not isinstance(value, tuple):
        if isinstance(value, int) and case.signature[name] in ("fp32", "f32", "fp64"):
            return float(value)
        return value
    if case.signature[name] == "struct":
        return b"".join(
            bytes(t.tolist()) if t.dtype == torch.uint8 else struct.pack("Q", t.data_ptr())
            for t in value
        )
    return torch.tensor([t.data_ptr() for t in value], dtype=torch.int64)


def mismatches(run: Run, before: dict[str, Tensor]) -> list[str]:
    """Differences of the tensors from the wants, or from before where nothing is wanted."""
    found = []
    for name, got in tensors_of(run).items():
        want = run.wants.get(name, before[name])
        if (difference := compare(got, want)) is not None:
            found.append(f"{name}{difference}")
    if unknown := set(run.wants) - set(tensors_of(run)):
        found.append(f"{sorted(unknown)} are wanted, but are no arguments")
    return found


def compare(got: Tensor, want: Want) -> str | None:
    """The first difference in words, or None.

    Without an error bound every bit counts, the sign of zero too; NaNs equal each other.
    """
    values = want.values if isinstance(want, Near) else want
    if got.shape != values.shape:
        return f" has shape {tuple(got.shape)}, but should have {tuple(values.shape)}"
    if isinstance(want, Near):
        wide = got.double()
        wrong = ~((wide - want.values).abs() <= want.error)
        wrong &= ~((wide == want.values) | (wide.isnan() & want.values.isnan()))
    else:
        if got.dtype != want.dtype:
            return f" is {got.dtype}, but should be {want.dtype}"
        wrong = ~same_bits(got, want)
    if not wrong.any():
        return None
    at = int(wrong.reshape(-1).nonzero()[0])
    held, right = got.reshape(-1)[at].item(), values.reshape(-1)[at].item()
    bound = f" +- {want.error.reshape(-1)[at].item():.3g}" if isinstance(want, Near) else ""
    return f"[{at}] is {held}, but should be {right}{bound} ({int(wrong.sum())} differ)"


def same_bits(got: Tensor, want: Tensor) -> Tensor:
    """Elementwise: equal bits, or both NaN."""
    if not got.dtype.is_floating_point:
        return got == want
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.dtype.itemsize]
    equal = got.contiguous().view(words) == want.contiguous().view(words)
    return equal | (got.isnan() & want.isnan())
