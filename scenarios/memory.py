"""Memory of a rank of ZeRO on the fast side: by formula, and counted tensor by tensor.

With n elements of a 16-bit model over W ranks, N = n rounded up to a multiple of 2 W, P = N / W and
gradients summed in fp32, a rank keeps

    2 N    model weights
    4 P    masters
    8 P    both moments
    4 P    reduced gradients; in stage 1 besides 4 N, the sums of this rank
    2 B    the buffer of the largest bucket, of B elements

and besides, while backward runs, the gradients themselves: 2 N bytes in stage 1, and in stage 2
2 B, as those of a bucket are dropped when it is sent.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from twinstep.fast import FusedAdam, ZeroOptimizer
from twinstep.parity.ranks.world import Rank, World
from twinstep.scenarios.calls import device_of
from twinstep.scenarios.plan import ZERO
from twinstep.scenarios.ranks import Ranks

PIECES = 16  # parameters of the model
WEIGHT, SINGLE = 2, 4  # bytes of an element
STEPS = 2  # the first makes what is kept
MEGA = 10**6
PATIENCE_S = 3600.0  # a rank of large models computes for minutes
LIMIT = 0.01  # difference between formula and count
WEAK: Any = StorageWeakRef  # has no types
HEADING = (
    "parameters  ranks  weights  masters    state     sums  buckets   in all  counted   differ  "
    "gradients"
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A model and the ranks that train it.

    Attributes:
        parameters: elements of the model, which is bf16.
        ranks: over which it is split.
        stage: of ZeRO, 1 or 2.
        bucket: largest number of elements that are reduced together.
    """

    parameters: int
    ranks: int = 1
    stage: int = 2
    bucket: int = 2**24

    @property
    def pieces(self) -> list[int]:
        """Elements of each parameter; all alike but the first."""
        each = self.parameters // PIECES
        return [self.parameters - (PIECES - 1) * each, *[each] * (PIECES - 1)]

    @property
    def kept(self) -> Mapping[str, int]:
        """Bytes that a rank keeps from step to step, by the formula, by kind."""
        padded = math.ceil(self.parameters / (2 * self.ranks)) * 2 * self.ranks
        own, each = padded // self.ranks, max(self.pieces)
        whole = self.bucket >= self.parameters
        bucket = padded if whole else max(each, self.bucket // each * each)
        return {
            "model_weights": WEIGHT * padded,
            "master_weights": SINGLE * own,
            "optimizer_state": 2 * SINGLE * own,
            "accumulators": SINGLE * own + (SINGLE * padded if self.stage == 1 else 0),
            "buckets": WEIGHT * bucket,
        }

    @property
    def gradients(self) -> int:
        """Bytes of gradients that a rank has at most while backward runs, by the formula."""
        return self.kept["model_weights" if self.stage == 1 else "buckets"]


@dataclass(frozen=True, kw_only=True)
class Found:
    """Bytes of a rank after some steps.

    Attributes:
        told: by the optimizer itself, by kind.
        kept: of all tensors.
        most: of all tensors, at any time; with other ranks, that of simulated messages, too.
    """

    told: Mapping[str, int]
    kept: int
    most: int


def apart(sizes: Sizes, found: Sequence[Found]) -> float:
    """Largest difference between formula and count on any rank, as a share of the formula."""
    kept = sum(sizes.kept.values())
    return max(abs(one.kept / kept - 1.0) for one in found)


class Counted(TorchDispatchMode):
    """Bytes of all memory that operations of this thread have made and that is still there.

    Attributes:
        most: the largest number so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held: dict[Any, int] = {}
        self.most = 0

    @property
    def bytes(self) -> int:
        """The number now."""
        self._held = {ref: size for ref, size in self._held.items() if not ref.expired()}
        return sum(self._held.values())

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Carry out an operation, and note what it has made; views are of what was there."""
        result = func(*args, **(kwargs or {}))
        given = {_storage(leaf)._cdata for leaf in tree_leaves((args, kwargs)) if _dense(leaf)}
        for made in tree_leaves(result):
            if _dense(made) and _storage(made)._cdata not in given:
                self._held[WEAK(_storage(made))] = _storage(made).nbytes()
        self.most = max(self.most, self.bytes)
        return result


def _dense(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def measured(sizes: Sizes) -> list[Found]:
    """Memory of every rank, simulated, after some steps."""

    def one(rank: Rank) -> Found:
        return of_rank(sizes, Ranks(rank.number, sizes.ranks, rank.group("data")), device)

    with device_of("fast") as device:
        return World(sizes.ranks, patience=PATIENCE_S).run(one)


def of_rank(sizes: Sizes, ranks: Ranks, device: torch.device) -> Found:
    """Memory of one rank, all of which call this."""
    with Counted() as counted:
        params = [
            nn.Parameter(torch.zeros(size, dtype=torch.bfloat16, device=device))
            for size in sizes.pieces
        ]
        optimizer = ZeroOptimizer(
            FusedAdam(params),
            param_names={param: str(number) for number, param in enumerate(params)},
            partition_grads=sizes.stage == 2,
            reduce_bucket_size=sizes.bucket,
            dp_process_group=ranks.group if ranks.count > 1 else None,
            verbose=False,
        )
        for _ in range(STEPS):
            optimizer.backward(torch.stack([param.sum() for param in params]).sum())
            optimizer.step()
        told = {kind: size for kind, size in optimizer.memory_report().items() if size}
        return Found(told=told, kept=counted.bytes, most=counted.most)


def add_memory(command: argparse.ArgumentParser, whole: Callable[[str], int]) -> None:
    """Options of `memory`; `whole` reads a number that is at least 1."""
    add = command.add_argument
    add("--parameters", type=whole, nargs="+", default=[10], metavar="M", help="in millions")
    add("--ranks", type=whole, nargs="+", default=[1, 2, 4, 8], metavar="W")
    add("--optimizer", choices=ZERO, default="zero2")
    add("--bucket", type=whole, default=2**24, help="elements that are reduced together at most")


def memory_command(chosen: argparse.Namespace) -> int:
    """Print a line for each model and number of ranks; 1 if formula and count differ."""
    stage, differ = 1 + ZERO.index(chosen.optimizer), 0
    print(f"{chosen.optimizer}, bf16, in MB (10^6 bytes) of one rank\n{HEADING}")
    for millions, ranks in itertools.product(chosen.parameters, chosen.ranks):
        sizes = Sizes(parameters=millions * MEGA, ranks=ranks, stage=stage, bucket=chosen.bucket)
        found = measured(sizes)
        share, kept = apart(sizes, found), sizes.kept.values()
        differ |= share > LIMIT
        counted = max(one.kept for one in found)
        shown = " ".join(f"{size / MEGA:8.1f}" for size in (*kept, sum(kept), counted))
        shown += f"  {share:7.4%} {sizes.gradients / MEGA:10.1f}"
        print(f"{sizes.parameters:10d}  {ranks:5d} {shown}", flush=True)
    return differ
