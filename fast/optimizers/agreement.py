"""Refusals and loss scales in the messages of a step: no message more, and nothing waits.

Slots of the limbs from TOLD on, added up over ranks like those before:

    0   2**30 + 1 + its number, of each rank that refuses the step
    1   1
    2   d, a digest of the scale that the gradients were made with
    3   d**2

All digests are equal where slot 1 times slot 3 is the square of slot 2 (Cauchy and Schwarz), also
in integers that wrap around. For a norm whose messages take the largest instead of the sum, slot 3
holds -d, and all are equal where slots 2 and 3 add up to 0.

The program that finalises a step reads the slots. It skips a step that another rank refuses, or has
another scale for, moves nothing else, and leaves the reason in the control `exhausted`.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from twinstep.contract.agreement import refused_elsewhere
from twinstep.fast.kernels._limbs import DIFFERS, INFINITY, LARGEST, NONFINITE, REFUSED, TOLD

TOLD_SLOTS = slice(TOLD.value, TOLD.value + 4)
PRIME = 16777213  # no two powers of two have one digest, since their bits are apart by k * 2**52
REFUSAL = 2**30


def enter_scale(limbs: Tensor, word: Tensor, kind: str) -> None:
    """Enter the scale of a rank that does not refuse.

    Args:
        limbs: of an empty sum; written.
        word: the scale's bits as an int64, shape ().
        kind: of the norm.
    """
    ranks, digest, square = limbs[TOLD.value + 1 : TOLD_SLOTS.stop]
    torch.remainder(word, PRIME, out=digest)
    if kind == "inf":
        torch.neg(digest, out=square)
    else:
        ranks.fill_(1)
        torch.mul(digest, digest, out=square)


def refuse(rows: list[Tensor], kind: str) -> None:
    """Leave nothing in the rows but a refusal of this rank, which skips the step of all."""
    number = dist.get_rank() + 1 if dist.is_initialized() else 0
    for row in rows:
        row.zero_()
    rows[0][TOLD.value] = REFUSAL + number
    slot, nan = (LARGEST, INFINITY.value + 1) if kind == "inf" else (NONFINITE, 1 << 32)
    rows[0][slot.value] = nan


def raise_told(exhausted: Tensor) -> int:
    """The reason in the control `exhausted`, which has none from then on; waits for the device.

    Raises:
        ValueError: another rank has refused a step, or has another scale.
    """
    reason = int(exhausted.item())
    if reason:
        exhausted.zero_()
    told = reason // REFUSED.value
    if told:
        # Several refusals have been added up.
        number = told % REFUSAL if told < 2 * REFUSAL else 0
        raise refused_elsewhere(number - 1 if number else None)
    if reason & DIFFERS.value:
        raise ValueError("loss scale differs from that of another rank, but should be the same")
    return reason
