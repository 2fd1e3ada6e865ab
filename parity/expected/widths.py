"""How wide the bounds of an operation are, as one number per output that can be compared."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from twinstep.parity.cases.case import Recipe
from twinstep.parity.cases.generate import generate
from twinstep.parity.expected.outputs import accepted_outputs
from twinstep.parity.operations.operation import Bound, Operation

SIZES = (257,)
SEED = 11


def widths(operations: Iterable[Operation]) -> dict[str, float]:
    """Median bound in ULP of fp32 at the result, for each operation, dtype and written list.

    Always on the same inputs, whatever a run has drawn, so that any change is the bound's own.
    """
    found = {}
    for operation in operations:
        if operation.bound is Bound.EXACT or not operation.lists:
            continue
        for dtype in operation.combinations:
            for name, width in _widths(operation, dtype).items():
                found[f"{operation.name} {dtype} {name}"] = width
    return found


def _widths(operation: Operation, dtype: str) -> dict[str, float]:
    recipe = Recipe(
        layout="list",
        sizes=SIZES,
        regime="ordinary",
        seed=SEED,
        controls={control.name: control.values[0] for control in operation.controls},
        options={option.name: option.choices[0] for option in operation.options},
    )
    outputs = accepted_outputs(generate(operation, dtype, recipe), "bounded")
    measured = {}
    for name, row in outputs.items():
        ratios = [
            _in_ulp(accepted.exact, accepted.bound)
            for accepted in row
            if accepted.exact is not None
        ]
        usable = [ratio for ratio in ratios if ratio is not None and ratio.numel()]
        if usable:
            measured[name] = float(torch.cat(usable).median())
    return measured


def _in_ulp(exact: Tensor, bound: Tensor | None) -> Tensor | None:
    if bound is None:
        return None
    exact, bound = exact.reshape(-1), bound.reshape(-1)
    _, exponent = torch.frexp(exact)
    usable = torch.isfinite(exact) & (exact != 0) & torch.isfinite(bound)
    return (bound / torch.exp2((exponent - 24).to(torch.float64)))[usable]
