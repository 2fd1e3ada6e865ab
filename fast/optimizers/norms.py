"""Norms of gradients by kind: which ones kernels have, and the others on the host."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from twinstep.contract.parallel import Groups
from twinstep.fast.kernels._limbs import LARGEST, NONFINITE
from twinstep.fast.kernels.reduce import reduce_gradients
from twinstep.fast.optimizers.parallelism import Gradients, NormBucket
from twinstep.fast.runtime.tables import TableCache

KINDS = {1.0: "1", 2.0: "2", math.inf: "inf"}
GIVEN = "given"  # the host computes the norm
LARGEST_SLOT = LARGEST.value  # among the limbs: where the largest magnitude is


def kind_of_norm(norm_type: float, where: str) -> str:
    """Return how a norm is computed: the name of a kernel's norm, or GIVEN.

    Raises:
        ValueError: norm_type is not positive.
    """
    if not float(norm_type) > 0.0:
        raise ValueError(f"norm_type={norm_type}, but should be positive or infinite [{where}]")
    return KINDS.get(float(norm_type), GIVEN)


def reduce_norm(grads: Sequence[Tensor], limbs: Tensor, kind: str, cache: TableCache) -> None:
    """Enter all gradients into the limbs, in one launch for each dtype."""
    reduce_gradients(grads, limbs, cache, kind="2" if kind == GIVEN else kind)


def norm_on_host(
    gradients: Gradients, power: float, limbs: Tensor, *, counts: bool = True
) -> Tensor:
    """Return (sum |g|^power)^(1/power) over all ranks, each power rounded; float64, shape ().

    Reads every gradient, and so waits for the device. The sum of a share is rounded once, and once
    more for each group that it is added or averaged over.

    Args:
        gradients: see `fast.optimizers.parallelism`.
        power: positive.
        limbs: tell of gradients anywhere that are not finite. Any NaN gives NaN, otherwise any
            infinity gives infinity.
        counts: False leaves the gradients of this rank out.
    """
    shares = gradients.shares
    if not counts:
        shares = [replace(share, tensors=()) for share in shares]
    sums = [_powers(share, power, gradients.model, limbs.device) for share in shares]
    found = int(limbs[NONFINITE.value])
    norm = _sum_of_powers([_sum_of_powers(sums, 1.0)], 1.0 / power)
    norm = math.nan if found >> 32 else math.inf if found else norm
    return torch.tensor(norm, dtype=torch.float64)


def _sum_of_powers(magnitudes: Sequence[float], power: float) -> float:
    """Return the sum of m^power, rounded once; infinity where float64 has no number for it."""
    try:
        return math.fsum(m**power for m in magnitudes)
    except OverflowError:
        return math.inf


def _powers(share: NormBucket, power: float, model: Groups, device: torch.device) -> float:
    """The sum over a share, without what is not finite."""
    wide = [grad.detach().to(torch.float64).abs().view(-1).tolist() for grad in share.tensors]
    own = _sum_of_powers([m for each in wide for m in each if math.isfinite(m)], power)
    total = torch.tensor(own, dtype=torch.float64, device=device)
    if share.experts is not None:
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=share.experts)
    if share.replicas is not None:
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=share.replicas)
        total /= dist.get_world_size(share.replicas)
    for group in model:
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    return total.item()
