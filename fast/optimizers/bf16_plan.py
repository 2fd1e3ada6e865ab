"""Accumulation and norm of partitioned groups, laid out once for the same gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import or_

from torch import Tensor

from twinstep.contract.tensors import check_dense_gradients
from twinstep.fast.kernels.accumulate import accumulate_lists
from twinstep.fast.optimizers.bf16_groups import PartitionedGroup, accumulate_gradients
from twinstep.fast.optimizers.parallelism import NOWHERE, Gradients, Parallelism, Place
from twinstep.fast.runtime.lists import FixedTensors, Layout
from twinstep.fast.runtime.tables import TableCache
from twinstep.fast.runtime.watch import GradientReader, gradient


class Accumulation:
    """Parameters' own gradients, added to the accumulators: one launch for each dtype of them.

    Args:
        groups: whose accumulators are written.
        where: for messages.
    """

    def __init__(self, groups: Sequence[PartitionedGroup], where: str) -> None:
        self._groups, self._where = groups, where
        self._cache = TableCache()
        self._reader: GradientReader | None = None
        self._addresses: list[int] = []

    def add(self, *, by_hooks: bool) -> None:
        """Add what there is, and note which parameters had a gradient.

        Args:
            by_hooks: hooks have done so; what they left is checked alone.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        if by_hooks:
            check_dense_gradients(chain(*(group.params for group in self._groups)), self._where)
            return
        reader = self._reader
        addresses = [group.accumulator.data_ptr() for group in self._groups]
        if reader is None or addresses != self._addresses or not reader.read():
            self._addresses = addresses
            reader = self._reader = self._lay_out()
            read = reader.read()
            assert read
        if self._grads is None:
            accumulate_gradients(self._groups)
            return
        accumulate_lists(self._views, self._grads, self._cache)
        for group, here in zip(self._groups, self._here, strict=True):
            group.has_gradient = list(map(or_, group.has_gradient, here))

    def _lay_out(self) -> GradientReader:
        params = [param for group in self._groups for param in group.params]
        check_dense_gradients(params, self._where)
        reader = GradientReader(params)
        self._here = [[param.grad is not None for param in g.params] for g in self._groups]
        views = chain.from_iterable(group.gradients() for group in self._groups)
        self._views = FixedTensors(
            view for view, has in zip(views, chain(*self._here), strict=True) if has
        )
        grads = [gradient(param) for param in reader.params]
        self._grads: Sequence[Tensor] | None = None
        if all(reader.contiguous):
            self._grads = reader.moving(slice(0, len(grads)), Layout(grads))
        return reader


class Runs:
    """Accumulated gradients by what they count for, in as few views as can be."""

    def __init__(self, groups: Sequence[PartitionedGroup], parallelism: Parallelism) -> None:
        self._groups, self._parallelism = groups, parallelism
        self._used = [group.numel for group in groups]
        self._key: object = None
        self._at: dict[Place, Sequence[Tensor]] = {}
        self._gradients: Gradients | None = None

    def gradients(self) -> Gradients:
        """Gradients that count in the norm of this step."""
        key = [(group.accumulator.data_ptr(), group.has_gradient) for group in self._groups]
        if key != self._key:
            self._key = [(address, list(has)) for address, has in key]
            self._at = {place: FixedTensors(runs) for place, runs in self._by_place().items()}
            self._gradients = None
        if not self._parallelism.alone:
            return self._parallelism.gradients(self._at)
        if self._gradients is None:
            self._gradients = self._parallelism.gradients(self._at)
        return self._gradients

    def whole(self) -> list[Tensor]:
        """Everything that is accumulated, in one view of each group."""
        pairs = zip(self._groups, self._used, strict=True)
        return [group.accumulator[:used] for group, used in pairs if used]

    def _by_place(self) -> dict[Place, list[Tensor]]:
        at: dict[Place, list[Tensor]] = {}
        for group in self._groups:
            places = self._parallelism.places(group.params)
            # Only the norm decides whether a step is skipped: what does not count is left out.
            for place in {*places} - {NOWHERE}:
                rows = zip(places, group.has_gradient, strict=True)
                at.setdefault(place, []).extend(group.runs([has and p == place for p, has in rows]))
        return at
