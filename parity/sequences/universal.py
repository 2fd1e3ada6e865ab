"""Universal checkpoints, written from drawn values: one folder for each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from twinstep.parity.sequences.fills import filled


def write_universal(
    folder: Path,
    params: Iterable[tuple[str, Tensor]],
    groups: Sequence[Mapping[str, object]],
    seed: int,
    missing: str,
    seed_of: Callable[[Tensor, int], int] = lambda param, own: own,
) -> None:
    """Write a checkpoint.

    Args:
        folder: gets it.
        params: by name; those without elements have no folder.
        groups: hyper-parameters.
        seed: of the values.
        missing: what of it is missing: the last folder, its weight, one of its elements, or
            nothing if it is empty.
        seed_of: seed of the values of a parameter, from that of its place.
    """
    (folder / "zero").mkdir()
    options = [{key: row[key] for key in row if key != "params"} for row in groups]
    torch.save({"param_groups": options}, folder / "zero" / "optimizer_state.pt")
    # Numbers count what has no elements, too: of another rank it may have some.
    rows = [(at, *row) for at, row in enumerate(params) if row[1].numel()]
    for at, name, param in rows:
        kinds = ["fp32", "exp_avg", "exp_avg_sq"]
        lacks = missing if at == rows[-1][0] else ""
        if lacks == "folder":
            continue
        place = folder / "zero" / name
        place.mkdir()
        for number, kind in enumerate(kinds[1:] if lacks == "weight" else kinds):
            own = seed_of(param, seed + 3 * at + number)
            values = filled((param.numel(),), torch.float32, "ordinary", own)
            values = values.abs() if kind == "exp_avg_sq" else values
            torch.save({"param": values[lacks == "elements" :].clone()}, place / f"{kind}.pt")
        torch.save(seed % 1000, place / "step.pt")
