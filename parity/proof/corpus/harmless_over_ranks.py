"""Wrappers that are right over ranks and send other messages than the reference."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from twinstep.parity.proof.corpus.bucketed_zero import PRIVATE, Bucketed
from twinstep.parity.proof.corpus.optimizers import Optimizer, put
from twinstep.parity.proof.corpus.wrong_over_ranks import BF16, FP16, Prepare, asked, talking
from twinstep.reference.optimizers.bf16 import BF16Optimizer
from twinstep.reference.optimizers.fp16 import FP16Optimizer
from twinstep.reference.optimizers.parallelism import Pairs, Parallelism
from twinstep.reference.unscale import worst_of

HARMLESS_OVER_RANKS: list[Optimizer] = []


class Flags(Parallelism):
    """Gathers flags of all ranks in the place of their maximum."""

    def worst(self, prepare: Prepare, scale: float | None = None) -> tuple[Pairs, float]:
        """The largest flag."""
        pairs = prepare()
        own = worst_of([grad for _, grad in pairs]).reshape(1)
        for group in asked(self):
            flags = [torch.empty(1) for _ in range(dist.get_world_size(group))]
            work = dist.all_gather(flags, own, group=group, async_op=True)
            assert work is not None
            work.wait()
            own = torch.cat(flags).max().reshape(1)
        return pairs, own.item()


@put(HARMLESS_OVER_RANKS, **FP16)
class GathersFlags(talking(FP16Optimizer, Flags)):  # type: ignore[misc]
    """Asks every rank whether it overflows."""


@put(HARMLESS_OVER_RANKS, **BF16)
class BroadcastsWeights(BF16Optimizer):
    """Sends the weights of each rank to the others, all at once."""

    def _gather(self) -> None:
        works: list[tuple[Tensor, Tensor, dist.Work | None]] = []
        for group in self.groups:
            if group.process_group is None:
                continue
            for rank, part in enumerate(group.partitions(group.flat)):
                sent = part.clone()
                work = dist.broadcast(
                    sent, group=group.process_group, group_src=rank, async_op=True
                )
                works.append((part, sent, work))
        for part, sent, work in works[::-1]:
            assert work is not None
            work.wait()
            part.copy_(sent)


@put(
    HARMLESS_OVER_RANKS,
    reference="ZeroOptimizer",
    dtypes=("mixed",),
    private=PRIVATE,
    over_ranks=True,
)
class ReducesBuckets(Bucketed):
    """Reduces gradients bucket by bucket, each to its owner, where the reference reduces all."""
