"""Gradients of all ranks into one exact sum; nothing waits for the device.

Limbs are integers: neither the order of ranks nor the algorithm on the wire can matter. What is not
finite travels in them, so that a step is skipped by all ranks or by none, without a message more.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from twinstep.fast.kernels._limbs import INFINITY, LIMBS, NONFINITE
from twinstep.fast.optimizers.agreement import TOLD_SLOTS, enter_scale, refuse
from twinstep.fast.optimizers.norms import LARGEST_SLOT, reduce_norm
from twinstep.fast.optimizers.parallelism import Gradients, NormBucket
from twinstep.fast.runtime.tables import TableCache

CARRIED = 31  # the slot in which a row carries what is known to be non-finite elsewhere
LOW = 0xFFFFFFFF


def reduce_over_ranks(
    gradients: Gradients,
    limbs: Tensor,
    kind: str,
    cache: TableCache,
    *,
    scale: Tensor | None = None,
    refusal: Exception | None = None,
) -> Exception | None:
    """Enter all gradients of all ranks into the limbs.

    One launch for each dtype of each share, and one collective for each group; in the simplest case
    of a model over several ranks, that is one all-reduce of 256 bytes.

    Args:
        gradients: contiguous, on the limbs' device. Those that do not count are looked at for
            infinities and NaN, which end up where those of the others are.
        limbs: of an empty sum; written.
        kind: of the norm: "1", "inf", or any other name, for which squares are entered.
        cache: of pointer tables.
        scale: bits of the scale that the gradients were made with, which all ranks should have
            alike; int64, shape ().
        refusal: why this rank cannot step.

    Returns:
        The refusal, or an error in entering this rank's gradients, which is one: to be raised once
        all collectives of the step have been met, with the limbs cleared. None without.
    """
    alone = gradients.one_sum
    rows = [limbs]
    if not alone:
        matrix = limbs.new_zeros(len(gradients.shares) + 1, limbs.numel())
        rows = list(matrix)
    try:
        if refusal is None:
            _enter(gradients, rows, kind, cache)
    except Exception as error:
        refusal = error
    if gradients.over_ranks:
        if refusal is not None:
            refuse(rows, kind)
        elif scale is not None:
            enter_scale(rows[0], scale, kind)
    if not alone:
        _add_shares_up(gradients, matrix, limbs, kind)
    for group in gradients.model:
        dist.all_reduce(limbs, op=_operation(kind), group=group)
    return refusal


def _operation(kind: str) -> dist.ReduceOp.RedOpType:
    return dist.ReduceOp.MAX if kind == "inf" else dist.ReduceOp.SUM


def _enter(gradients: Gradients, rows: list[Tensor], kind: str, cache: TableCache) -> None:
    """Enter this rank's gradients: all into one row, or each share and the rest into its own."""
    if len(rows) == 1:
        reduce_norm(gradients.counted, rows[0], kind, cache)
        return
    for share, row in zip(gradients.shares, rows, strict=False):
        reduce_norm(share.tensors, row, kind, cache)
    reduce_norm(gradients.uncounted, rows[-1], kind, cache)


def _add_shares_up(gradients: Gradients, rows: Tensor, limbs: Tensor, kind: str) -> None:
    """Add each share's row up over its ranks, and the rows into the limbs."""
    told = rows[0, TOLD_SLOTS].clone()
    for share, row in zip(gradients.shares, rows, strict=False):
        _agree(share, row, rows, told, kind)
    known = torch.cat([_nonfinite(rows, kind)[None], told])
    for group in gradients.unreduced:
        dist.all_reduce(known, op=_operation(kind), group=group)
    found, told = known[0], known[1:]
    if kind == "inf":
        limbs.copy_(rows[:-1].amax(0))
        infinite = torch.where(found == 0, limbs[LARGEST_SLOT], INFINITY.value)
        # The bits of a NaN come behind those of infinity.
        limbs[LARGEST_SLOT] = torch.where(found > LOW, INFINITY.value + 1, infinite)
    else:
        limbs.copy_(rows[:-1].sum(0))
        limbs[NONFINITE.value] = found
    limbs[TOLD_SLOTS] = told


def _agree(share: NormBucket, row: Tensor, rows: Tensor, told: Tensor, kind: str) -> None:
    """Add a share's row up over the ranks that hold other experts, and average over copies."""
    for group in (share.experts, share.replicas):
        if group is not None:
            row[CARRIED] = _nonfinite(rows, kind)
            row[TOLD_SLOTS] = told
            dist.all_reduce(row, op=_operation(kind), group=group)
            told.copy_(row[TOLD_SLOTS])
    if share.replicas is not None and kind != "inf":
        _divide(row, dist.get_world_size(share.replicas))


def _nonfinite(rows: Tensor, kind: str) -> Tensor:
    """1 if there is an infinity in any row, plus 2**32 if there is a NaN; int64, shape ()."""
    words = rows[:, NONFINITE.value]
    if kind == "inf":
        bits = rows[:, LARGEST_SLOT]
        words = (bits == INFINITY.value) + ((bits > INFINITY.value).to(torch.int64) << 32)
    words = torch.stack([words, rows[:, CARRIED]])
    infinity, nan = (words & LOW) != 0, (words >> 32) != 0
    return infinity.any().to(torch.int64) + (nan.any().to(torch.int64) << 32)


def _divide(limbs: Tensor, count: int) -> None:
    """Divide the sum by a number of ranks, in place, rounded down to a unit of the lowest limb."""
    digits = limbs[: LIMBS.value]
    if count & (count - 1) == 0:
        # What a limb cannot give is a whole number of units of the one below it.
        shift = count.bit_length() - 1
        below = (digits[1:] & (count - 1)) << (32 - shift)
        digits >>= shift
        digits[:-1] += below
        return
    rest = torch.zeros_like(digits[0])
    for place in reversed(range(LIMBS.value)):
        value = digits[place] + (rest << 32)
        digits[place] = value // count
        rest = value % count
