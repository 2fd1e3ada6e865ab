"""Classes after `ZeroOptimizer` whose steps or checkpoints are wrong, with one fault each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from twinstep.contract.checkpoint.elastic import FORMAT
from twinstep.contract.moments import StateDict
from twinstep.parity.proof.corpus.optimizers import Optimizer, put
from twinstep.parity.proof.corpus.wrong_zero import HALF, ZERO
from twinstep.reference.arithmetic import float64
from twinstep.reference.loss_scale import ScaleState
from twinstep.reference.optimizers.partitioned_groups import copy_masters_to_model
from twinstep.reference.optimizers.zero import ZeroOptimizer
from twinstep.reference.optimizers.zero_groups import ZeroGroup
from twinstep.reference.unscale import worst_of

WRONG_ZERO_STEPS: list[Optimizer] = []


def saved_over(entries: object) -> int:
    """Number of ranks that saved; 0 where entries are none."""
    rows = entries if isinstance(entries, list | tuple) else ()
    whole = all(isinstance(row, dict) and row.get("format") == FORMAT for row in rows)
    return len(rows) if whole else 0


class Loading(ZeroOptimizer):
    """Base of classes that get masters wrong when another number of ranks has saved them."""

    def load_state_dict(  # type: ignore[override]
        self,
        state_dict_list: Sequence[StateDict | None],
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = False,
        checkpoint_folder: Path | None = None,
    ) -> None:
        """Load, then do it."""
        states, masters = load_optimizer_states, load_from_fp32_weights
        super().load_state_dict(state_dict_list, states, masters, checkpoint_folder)
        count = saved_over(state_dict_list)
        if count and masters:
            self.misplace(count)
            self.update_lp_params()

    def misplace(self, count: int) -> None:
        """Get masters wrong, where this many ranks have saved them."""


@put(WRONG_ZERO_STEPS, "H08", **ZERO)
class IndexesWithPadding(Loading):
    """Reads later groups from where they would begin if earlier ones had their padding."""

    def misplace(self, count: int) -> None:
        shift = 0
        for group in self.groups:
            group.master.detach().copy_(group.master.detach().roll(shift))
            size = 2 * count
            shift += -(-group.numel // size) * size - group.numel


@put(WRONG_ZERO_STEPS, "H14", **ZERO)
class SubPartitions(Loading):
    """Reads partitions of stage 1, of other ranks, as halves that lie in turn."""

    def misplace(self, count: int) -> None:
        for group in self.groups:
            if count != group.world and not self.partition_gradients:
                halves = group.master.detach().view(2, -1)
                group.master.detach().copy_(halves.t().reshape(-1))


@put(WRONG_ZERO_STEPS, **ZERO)
class ForgetsTheOrderOnLoad(Loading):
    """Lays loaded masters out as if there were no round robin."""

    def misplace(self, count: int) -> None:
        for group in self.groups:
            if group.order != sorted(group.order):
                master = group.master.detach()
                places = [fragment.in_partition for fragment in group.fragments.values()]
                rows = [master[place.start : place.start + place.numel] for place in places]
                turned = torch.cat([*rows[::-1], master[sum(map(len, rows)) :]])
                master.copy_(turned)


@put(WRONG_ZERO_STEPS, **ZERO)
class CutsOthersParts(Loading):
    """Cuts masters as the ranks that saved them did, where these were others."""

    def misplace(self, count: int) -> None:
        for group in self.groups:
            if count != group.world and group.partition_size > 2:
                group.master.detach().copy_(group.master.detach().roll(2))


@put(WRONG_ZERO_STEPS, **ZERO)
class LoadsNoClipNorm(Loading):
    """Forgets the limit of the norm when it loads."""

    def misplace(self, count: int) -> None:
        self.clip_grad = 0.0


@put(WRONG_ZERO_STEPS, **{**ZERO, "over_ranks": False})
class EmptiesTheList(ZeroOptimizer):
    """Leaves no entry in the caller's list when it has loaded them."""

    def load_state_dict(  # type: ignore[override]
        self, state_dict_list: list[StateDict | None], *given: object, **more: object
    ) -> None:
        super().load_state_dict(state_dict_list, *given, **more)  # type: ignore[arg-type]
        state_dict_list[:] = [None for _ in state_dict_list]


@put(WRONG_ZERO_STEPS, **ZERO)
class ClosesTheGaps(ZeroOptimizer):
    """Leaves out entries that are not there, after which others are those of other ranks."""

    def load_state_dict(  # type: ignore[override]
        self, state_dict_list: list[StateDict | None], *given: object, **more: object
    ) -> None:
        there = [entry for entry in state_dict_list if entry is not None]
        super().load_state_dict(there, *given, **more)  # type: ignore[arg-type]


@put(WRONG_ZERO_STEPS, **ZERO)
class RefreshesFromTheFirst(ZeroOptimizer):
    """Takes the first partition of the model weights for the masters of every rank."""

    def refresh_fp32_params(self) -> None:
        for group in self.groups:
            group.master.detach().copy_(group.flat[: group.partition_size])


@put(WRONG_ZERO_STEPS, **ZERO)
class AddsRoundedSums(ZeroOptimizer):
    """Rounds sums over micro-batches to the dtype of the wire after each of them."""

    def fill_grad_accum_attribute(self) -> None:
        super().fill_grad_accum_attribute()
        for group in self.groups:
            wire = self.options.communication_data_type or group.flat.dtype
            group.accumulator.copy_(group.accumulator.to(wire))


@put(WRONG_ZERO_STEPS, **ZERO)
class KeepsPartialSums(ZeroOptimizer):
    """Drops gradients with zero_grad, but not the sums of this rank."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        kept = [group.accumulator.clone() for group in self.groups]
        super().zero_grad(set_to_none)
        for group, sums in zip(self.groups, kept, strict=True):
            group.accumulator.copy_(sums)


@put(WRONG_ZERO_STEPS, **ZERO)
class AgreesWithNobody(ZeroOptimizer):
    """Skips and clips by the gradients of its own partitions."""

    def _everyone(self) -> list[dist.ProcessGroup]:
        return []


@put(WRONG_ZERO_STEPS, **ZERO)
class LeavesOutTheModel(ZeroOptimizer):
    """Agrees with the data-parallel ranks, and not with those that hold one model together."""

    def _everyone(self) -> list[dist.ProcessGroup]:
        return super()._everyone()[:1] if self._data_group is not None else []


class CountingAll(ZeroGroup):
    """A group of which everything counts in the norm."""

    def counted(self, tensor_rank: int) -> Iterator[Tensor]:
        yield from super().counted(0)


class CountingExpertsTwice(ZeroGroup):
    """A group whose experts count in the norm once more."""

    def counted(self, tensor_rank: int) -> Iterator[Tensor]:
        for _ in range(1 if self.expert is None else 2):
            yield from super().counted(tensor_rank)


class Counting(ZeroOptimizer):
    """Base of classes whose groups are of another kind."""

    kind: type[ZeroGroup]

    def _laid_out(self, names: Mapping[Tensor, str], round_robin: bool) -> list[ZeroGroup]:
        groups = super()._laid_out(names, round_robin)
        for group in groups:
            group.__class__ = self.kind
        return groups


@put(WRONG_ZERO_STEPS, **ZERO)
class CountsCopiesAgain(Counting):
    """Counts in the norm, on every tensor-parallel rank, what all of them hold."""

    kind = CountingAll


@put(WRONG_ZERO_STEPS, **ZERO)
class CountsExpertsAgain(Counting):
    """Counts experts twice in the norm."""

    kind = CountingExpertsTwice


@put(WRONG_ZERO_STEPS, **{**HALF, "private": ("_found",)})
class ScalesByItsOwn(ZeroOptimizer):
    """Skips by the gradients of all ranks, and moves the scale by those of its own partitions."""

    def _clear_sums(self) -> None:
        self._found = worst_of([group.reduced for group in self.groups]).item() > 0.0
        super()._clear_sums()

    def _enter(self, found_inf: bool, after: ScaleState) -> None:
        super()._enter(found_inf, self.loss_scaler.after(self._found))


@put(WRONG_ZERO_STEPS, **HALF)
class DividesByTheNextScale(ZeroOptimizer):
    """Divides gradients by the scale of the next step, once it has moved."""

    def _scale_of_step(self, after: ScaleState) -> Tensor:
        return float64(after.scale)


@put(WRONG_ZERO_STEPS, **ZERO)
class StepsWithItsOwnGradients(ZeroOptimizer):
    """Takes no step without a gradient of its own, whatever other ranks have."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        if not self._taken and all(param.grad is None for param in self._params()):
            raise RuntimeError("there is no gradient")
        super().step(closure)  # type: ignore[call-overload]


@put(WRONG_ZERO_STEPS, **ZERO)
class KeepsSumsOfSkips(ZeroOptimizer):
    """Keeps the sums of a step that it skips."""

    def _clear_sums(self) -> None:
        kept = [group.reduced.clone() for group in self.groups]
        super()._clear_sums()
        for group, sums in zip(self.groups, kept, strict=True):
            if not bool(sums.isfinite().all()):
                group.reduced.copy_(sums)


@put(WRONG_ZERO_STEPS, **ZERO)
class GathersNothing(ZeroOptimizer):
    """Writes its own part of the model weights after a step, and gathers no other."""

    def update_lp_params(self) -> None:
        for group in self.groups:
            copy_masters_to_model(group)
