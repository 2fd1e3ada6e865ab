"""Part: index arithmetic past 2^31 elements, in real memory.

The update of one flat tensor of 2^31 + 4099 elements must equal the updates of its pieces, which
are small enough for 32-bit indices and judged elsewhere. The norm must see the last element.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from twinstep.benchmarks.part import Broken, Figures, Skipped
from twinstep.benchmarks.state import State, apply, controls, new_state
from twinstep.fast.kernels.adam import adamw_step_
from twinstep.fast.kernels.reduce import global_norm_

NUMEL = 2**31 + 4099
PIECE = 2**26


def run() -> Iterator[Figures]:
    """Check the update and the norm on the current GPU."""
    free, _ = torch.cuda.mem_get_info()
    # State, and while it is drawn one fp32 tensor more.
    needed = NUMEL * (4 + 2 + 4 + 4 + 2 + 4)
    if free < needed:
        raise Skipped(f"{free / 2**30:.0f} GiB of GPU memory free, needs {needed / 2**30:.0f}")
    yield check(torch.device("cuda"), NUMEL, PIECE)


def check(device: torch.device, numel: int, piece: int) -> Figures:
    """Check one flat tensor of `numel` elements against pieces of at most `piece`.

    Raises:
        Broken: a piece differs, or the norm is wrong.
    """
    whole = fill(numel, piece, device)
    apply(adamw_step_, whole, controls(device), bias_correction=True)
    for start in range(0, numel, piece):
        size = min(piece, numel - start)
        part = new_state([size], device, seed=start // piece)
        apply(adamw_step_, part, controls(device), bias_correction=True)
        end = start + size
        seen = State(tuple([_slice(role[0], start, end)] for role in whole.lists))
        if not seen.equals(part):
            raise Broken(f"the update of elements {start} to {end} of {numel} differs")
    check_norm(whole.grads[0])
    return {"elements": numel, "pieces": -(-numel // piece)}


def fill(numel: int, piece: int, device: torch.device) -> State:
    """One flat state made of the pieces' values."""
    dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.float32, torch.bfloat16)
    lists = [[torch.empty(numel, dtype=dtype, device=device)] for dtype in dtypes]
    for start in range(0, numel, piece):
        part = new_state([min(piece, numel - start)], device, seed=start // piece)
        for role, values in zip(lists, part.lists[:5], strict=True):
            role[0][start : start + values[0].numel()] = values[0]
    return State((*lists, [torch.zeros((), dtype=torch.int64, device=device)]))


def check_norm(grads: Tensor) -> None:
    """Overwrite the gradients with zeros and a few planted values, and check norm and found_inf.

    Raises:
        Broken: an element was not seen.
    """
    norm = torch.zeros((), device=grads.device)
    found_inf = torch.zeros((), device=grads.device)
    grads.zero_()
    # 3² + 4² + 12² = 13²: first, in the middle of the upper half, last.
    for place, value in ((0, 3.0), (grads.numel() - 1000, 4.0), (grads.numel() - 1, 12.0)):
        grads[place] = value
    global_norm_([grads], norm=norm, found_inf=found_inf)
    if (norm.item(), found_inf.item()) != (13.0, 0.0):
        raise Broken(f"norm={norm.item()!r}, but should be 13.0, found_inf={found_inf.item()!r}")
    grads[-1] = float("inf")
    global_norm_([grads], norm=norm, found_inf=found_inf)
    if found_inf.item() != 1.0:
        raise Broken("an infinity in the last element was not found")


def _slice(tensor: Tensor, start: int, end: int) -> Tensor:
    return tensor[start:end] if tensor.dim() else tensor
