"""Our exact sums, whose code is taken for what its own tests show it to be (see `SUMS_ARE_EXACT`).

`reference.norm.root_of_squares` is one operation for torch on names: a root of the sum of squares
of a set of elements. The kernels form it by integers; what leaves that code with the elements, and
in this run the bits, of a sum of the reference takes its name.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from twinstep.parity.prove.torch_names import TorchNames
from twinstep.replay.names.naming import set_names
from twinstep.replay.names.sums import INSIDE, ROUNDS, Sum, bag

SUMS_ARE_EXACT = (
    "sums of squares by integers are exact and rounded once (tests/fast/test_fast_limbs)"
)
MODULES = ("_limbs", "_squares", "reduce")
# Of LAMB's sweep its windows, and the choice between lanes' sums and another reading, are a sum's.
FUNCTIONS = {"_lamb_sweeps": ("window_of_tile", "both_limbs")}
PACKAGE = "twinstep.fast.kernels."
OUTSIDE = ("norm_kernel",)
ROUNDING = ("norm_of", "sum_of", "leading_digits", "round_limbs")


def places(file: str, line: int) -> str:
    """`INSIDE` the code of our sums, where it `ROUNDS`, or neither."""
    module = _path(file).stem
    if module not in (*MODULES, *FUNCTIONS) or not _ours(file):
        return ""
    function = next((name for name, first, last in _functions(file) if first <= line <= last), "")
    if module in FUNCTIONS:
        return INSIDE if function in FUNCTIONS[module] else ""
    if function in ROUNDING:
        return ROUNDS
    return "" if function in OUTSIDE or not function else INSIDE


def _ours(file: str) -> bool:
    module = sys.modules.get(PACKAGE + _path(file).stem)
    own = getattr(module, "__file__", None)
    return own is not None and _path(own) == _path(file)


@cache
def _path(file: str) -> Path:
    return Path(file).resolve()


@cache
def _functions(file: str) -> list[tuple[str, int, int]]:
    tree = ast.parse(Path(file).read_text())
    return [
        (node.name, node.lineno, node.end_lineno or node.lineno)
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    ]


def root(mode: TorchNames, func: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """`root_of_squares` on names: its float64 result, known to the session."""
    with torch._C._DisableTorchDispatch():
        result = func(tensors)
        bits = int(result.float().view(torch.int32)) % (1 << 32)
    mode.kept.append(result)
    elements = [n for t in tensors for n in mode.names(t).reshape(-1).tolist() if n >= 0]
    if not elements:
        set_names(mode.session, result, None)
        return result
    table = mode.session.table
    whole = bag(table, elements)
    number = table.row("root.of.squares.f64", (whole,), 4)
    named = torch.tensor(number).numpy().reshape(())
    set_names(mode.session, result, named)
    flags = [torch.any(~torch.isfinite(t)) for t in tensors]
    known = [int(mode.names(flag).reshape(())) for flag in flags]
    either = table.row("or", [n for n in known if n >= 0], 0)
    with torch._C._DisableTorchDispatch():
        outcome = any(bool(flag) for flag in flags)
    norm = table.row("cvt.rn.f32.f64", (number,), 2)
    mode.session.sums.told[whole] = Sum(norm, bits, either, outcome)
    return result
