"""Wrappers that the judge must reject over ranks, with one fault each; alone they are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from twinstep.contract.checkpoint.entries import PARTITIONS
from twinstep.contract.checkpoint.partitions import RANK
from twinstep.contract.parallel import Groups
from twinstep.parity.proof.corpus.optimizers import Optimizer, put
from twinstep.reference.arithmetic import float64
from twinstep.reference.clip import clip_factor
from twinstep.reference.loss_scale import ScaleState
from twinstep.reference.optimizers.bf16 import BF16Optimizer
from twinstep.reference.optimizers.collectives import largest
from twinstep.reference.optimizers.fp16 import FP16Optimizer
from twinstep.reference.optimizers.fp16_unfused import FP16UnfusedOptimizer
from twinstep.reference.optimizers.model_norm import Part, norm_of_parts
from twinstep.reference.optimizers.parallelism import (
    Pairs,
    Parallelism,
    gradient_parts,
    overflow_groups,
    with_gradients,
)
from twinstep.reference.unscale import worst_of

StateDict = dict[str, object]
Prepare = Callable[[], Pairs]
WRONG_OVER_RANKS: list[Optimizer] = []


def talking(base: type, parallelism: type[Parallelism]) -> type:
    """A wrapper whose communication is that of another class."""

    def construct(self: object, init_optimizer: torch.optim.Optimizer, **options: object) -> None:
        base.__init__(self, init_optimizer, **options)  # type: ignore[misc]
        made = cast(Any, self)
        found = made._parallelism
        made._parallelism = parallelism(**{f.name: getattr(found, f.name) for f in fields(found)})

    return type(base.__name__, (base,), {"__init__": construct})


def asked(parallelism: Parallelism) -> Groups:
    """Groups over which an overflow is agreed."""
    named = (parallelism.expert_groups, parallelism.expert_data_groups)
    experts = [groups[name] for groups in named for name in sorted(groups)]
    return overflow_groups(parallelism.mpu, parallelism.engine, experts)


def model_groups(parallelism: Parallelism) -> Groups:
    """The model-parallel group, if there is one."""
    return [] if parallelism.mpu is None else [parallelism.mpu.get_model_parallel_group()]


class NormOfOwnShard(Parallelism):
    """Adds the norm over no tensor-parallel rank."""

    def global_norm(self, pairs: Pairs, norm_type: float, worst: float) -> Tensor:
        """Leave the model-parallel group out."""
        parts = gradient_parts(self.counted(pairs), [], self.expert_groups, self.expert_data_groups)
        return norm_of_parts(parts, norm_type, worst=worst)


class OwnOverflow(Parallelism):
    """Agrees on an overflow with no other rank."""

    def worst(self, prepare: Prepare, scale: float | None = None) -> tuple[Pairs, float]:
        """Look at own gradients alone."""
        pairs = prepare()
        return pairs, worst_of([grad for _, grad in pairs]).item()


class FirstGroup(Parallelism):
    """Agrees on an overflow over the first group alone."""

    def worst(self, prepare: Prepare, scale: float | None = None) -> tuple[Pairs, float]:
        """Leave the other groups out."""
        pairs = prepare()
        own = worst_of([grad for _, grad in pairs])
        return pairs, largest(own, asked(self)[:1]).item()


class LeastOverflow(Parallelism):
    """Agrees on the least of all overflows."""

    def worst(self, prepare: Prepare, scale: float | None = None) -> tuple[Pairs, float]:
        """MIN for MAX."""
        pairs = prepare()
        own = worst_of([grad for _, grad in pairs])
        for group in asked(self):
            dist.all_reduce(own, dist.ReduceOp.MIN, group=group)
        return pairs, own.item()


class CountsReplicas(Parallelism):
    """Counts what all tensor-parallel ranks hold on each of them."""

    def counted(self, pairs: Pairs) -> Pairs:
        """All of them."""
        return pairs


class AverageOfShards(Parallelism):
    """Averages over tensor-parallel ranks what should be added."""

    def global_norm(self, pairs: Pairs, norm_type: float, worst: float) -> Tensor:
        """Take shards for copies."""
        parts = gradient_parts(self.counted(pairs), [], self.expert_groups, self.expert_data_groups)
        model = model_groups(self)
        parts[0] = Part(tensors=parts[0].tensors, replicas=model[0] if model else None)
        return norm_of_parts(parts, norm_type, worst=worst)


class DictOrder(Parallelism):
    """Asks expert groups in the order of the dict."""

    def worst(self, prepare: Prepare, scale: float | None = None) -> tuple[Pairs, float]:
        """Ranks may list them otherwise."""
        experts = [*self.expert_groups.values(), *self.expert_data_groups.values()]
        pairs = prepare()
        own = worst_of([grad for _, grad in pairs])
        return pairs, largest(own, overflow_groups(self.mpu, self.engine, experts)).item()


FP16 = {"reference": "FP16Optimizer", "dtypes": ("fp16",), "over_ranks": True}
UNFUSED = {**FP16, "reference": "FP16UnfusedOptimizer"}
BF16 = {"reference": "BF16Optimizer", "dtypes": ("bf16",), "over_ranks": True}


@put(WRONG_OVER_RANKS, **FP16)
class ShardNorm(talking(FP16Optimizer, NormOfOwnShard)):  # type: ignore[misc]
    """Clips by the norm of its own tensor-parallel shard."""


@put(WRONG_OVER_RANKS, **FP16)
class AgreesWithNoRank(talking(FP16Optimizer, OwnOverflow)):  # type: ignore[misc]
    """Skips a step alone."""


@put(WRONG_OVER_RANKS, **UNFUSED)
class AgreesOverTheFirstGroup(talking(FP16UnfusedOptimizer, FirstGroup)):  # type: ignore[misc]
    """Agrees on an overflow over the first of its groups."""


@put(WRONG_OVER_RANKS, **FP16)
class AgreesOnTheLeast(talking(FP16Optimizer, LeastOverflow)):  # type: ignore[misc]
    """Skips a step only if every rank overflows."""


@put(WRONG_OVER_RANKS, **UNFUSED)
class CountsReplicasTwice(talking(FP16UnfusedOptimizer, CountsReplicas)):  # type: ignore[misc]
    """Counts in the norm, on every tensor-parallel rank, what all of them hold."""


@put(WRONG_OVER_RANKS, **BF16)
class AveragesShards(talking(BF16Optimizer, AverageOfShards)):  # type: ignore[misc]
    """Averages the norm over tensor-parallel ranks."""


@put(WRONG_OVER_RANKS, **FP16)
class AsksInOrderOfTheDict(talking(FP16Optimizer, DictOrder)):  # type: ignore[misc]
    """Asks the groups of experts in the order in which they were listed."""


@put(WRONG_OVER_RANKS, **FP16)
class ClipsByOwnNorm(FP16Optimizer):
    """Reports the norm of the model, and clips by that of its own gradients."""

    def _update(self, factor: Tensor) -> None:
        del factor
        params = [param for group in self.fp16_groups for param in group]
        own = Parallelism().global_norm(with_gradients(params), self.norm_type, 0.0)
        scale = self._scale_of_step(self.loss_scaler.after(False))
        super()._update(clip_factor(norm=own, scale=scale, max_norm=float64(self.clip_grad)))


@put(WRONG_OVER_RANKS, **FP16)
class ScalesBeforeItAgrees(FP16Optimizer):
    """Moves the scale by the overflow of its own gradients, and skips by that of all."""

    def _enter(self, found_inf: bool, after: ScaleState) -> None:
        super()._enter(found_inf, self.loss_scaler.after(self._own))

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Remember what is found here."""
        grads = [param.grad for group in self.fp16_groups for param in group]
        self._own = any(not bool(g.to_dense().isfinite().all()) for g in grads if g is not None)
        try:
            super().step(closure)  # type: ignore[call-overload]
        finally:
            del self._own


@put(WRONG_OVER_RANKS, **FP16)
class ForgetsScaleOnOtherRanks(FP16Optimizer):
    """Restores the loss scale on the first rank alone."""

    def load_state_dict(self, state_dict: StateDict, load_optimizer_states: bool = True) -> None:
        before = self.loss_scaler.state
        super().load_state_dict(state_dict, load_optimizer_states)
        if dist.is_initialized() and dist.get_rank():
            self.loss_scaler.state = before


@put(WRONG_OVER_RANKS, **BF16)
class LoadsOtherExperts(BF16Optimizer):
    """Takes experts from the entry of the rank that its number among copies of them names."""

    def load_state_dict(  # type: ignore[override]
        self, state_dict_list: Sequence[StateDict], *given: object, **named: object
    ) -> None:
        entries = [dict(entry) for entry in state_dict_list]
        rows = [entry.get(PARTITIONS) for entry in entries]
        count = len(self.groups)
        if len(rows) > 1 and all(isinstance(row, list) and len(row) == count for row in rows):
            for at, group in enumerate(self.groups):
                if group.expert is not None:
                    theirs = cast(list[Tensor], rows[group.rank])[at]
                    rows = [[*row[:at], theirs, *row[at + 1 :]] for row in cast(Any, rows)]
            entries = [{**e, PARTITIONS: row} for e, row in zip(entries, rows, strict=True)]
        super().load_state_dict(entries, *given, **named)  # type: ignore[arg-type]


@put(WRONG_OVER_RANKS, **BF16)
class LoadsTheFirstEntry(BF16Optimizer):
    """Loads the entry of the first rank on all of them."""

    def load_state_dict(  # type: ignore[override]
        self, state_dict_list: Sequence[StateDict], *given: object, **named: object
    ) -> None:
        entries = [dict(state_dict_list[0], **{RANK: entry.get(RANK)}) for entry in state_dict_list]
        super().load_state_dict(entries, *given, **named)  # type: ignore[arg-type]


@put(WRONG_OVER_RANKS, **BF16)
class GathersWholeBuckets(BF16Optimizer):
    """Gathers buckets that are full, and no rest."""

    def _gather(self) -> None:
        for group in self.groups:
            piece = min(max(self.allgather_bucket_size // group.world, 1), group.partition_size)
            whole = group.partition_size // max(piece, 1) * piece
            partitions = group.partitions(group.flat)
            for start in range(0, whole, max(piece, 1)) if group.world > 1 else ():
                views = [partition[start : start + piece] for partition in partitions]
                gathered = [torch.empty_like(view) for view in views]
                dist.all_gather(gathered, views[group.rank].clone(), group=group.process_group)
                for view, received in zip(views, gathered, strict=True):
                    view.copy_(received)


@put(WRONG_OVER_RANKS, **BF16)
class ForgetsStepsOfPadding(BF16Optimizer):
    """Starts to count anew where a universal checkpoint has nothing for the partition of a rank."""

    def load_state_dict(  # type: ignore[override]
        self,
        state_dict_list: Sequence[StateDict],
        checkpoint_folder: object = None,
        **named: object,
    ) -> None:
        super().load_state_dict(state_dict_list, checkpoint_folder, **named)  # type: ignore[arg-type]
        for group in self.groups if checkpoint_folder is not None else ():
            state = self.state.get(group.master, {})
            if not group.fragments and "step" in state:
                state["step"].zero_()


@put(WRONG_OVER_RANKS, **BF16)
class LeavesOutTheGather(BF16Optimizer):
    """Gathers no weights where its own part of the gradients overflows."""

    def _gather(self) -> None:
        parts = [group.own(group.accumulator) for group in self.groups]
        if all(bool(part.isfinite().all()) for part in parts):
            super()._gather()


@put(WRONG_OVER_RANKS, **BF16)
class SortsEntries(BF16Optimizer):
    """Puts the entries of ranks in order where they come in another, which should be refused."""

    def load_state_dict(  # type: ignore[override]
        self, state_dict_list: Sequence[StateDict], *given: object, **named: object
    ) -> None:
        whole = all(isinstance(entry, dict) and entry.get(RANK) for entry in state_dict_list)
        if whole and all(isinstance(entry[RANK], list) for entry in state_dict_list):
            state_dict_list = sorted(state_dict_list, key=lambda entry: cast(Any, entry[RANK])[0])
        super().load_state_dict(state_dict_list, *given, **named)  # type: ignore[arg-type]
