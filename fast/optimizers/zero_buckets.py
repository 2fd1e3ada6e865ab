"""Buckets of gradients, reduced over ranks to the ranks that own them while backward runs.

A bucket is a run of neighbours in the flat layout of one group, cut from its end to its beginning,
of at most `reduce_bucket_size` elements (or one longer parameter). Every rank sends all buckets in
one fixed order, in which backward is expected to finish them: the last in the model first. A bucket
that is complete waits for those before it, and what has no gradient is sent as zeros, so that ranks
with other gradients, or in another order of arrival, never meet in different messages.

    the whole of a group       one reduce_scatter_tensor, padding included
    a part of it               one reduce to each rank that owns some of it
    reduce_scatter=False       one all_reduce
    on one rank                no message

In the first two cases each rank sends (W - 1) / W of what it hands in, as few bytes as can be. The
order in which the backend adds ranks up decides the bits; it may depend on the bucket where the
algorithm does (a ring adds each chunk from another rank on).

One buffer is filled, sent and added to `reduced` at a time; with `overlap_comm` there are two, and
on a GPU sending has a stream of its own. Nothing waits for the device.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from twinstep.contract.fragments import Partition
from twinstep.contract.tensors import check_dense_gradients, drop_gradients
from twinstep.contract.zero import ZeroOptions
from twinstep.fast.kernels.accumulate import accumulate_
from twinstep.fast.optimizers.bf16_groups import accumulate_gradients
from twinstep.fast.optimizers.zero_cut import Bucket, cut
from twinstep.fast.optimizers.zero_groups import ZeroGroup
from twinstep.fast.optimizers.zero_offload import Offload

EXACT = 256  # every whole number up to this is one of bf16, and of fp16


@dataclass(frozen=True, eq=False)
class Flight:
    """A bucket on its way.

    Attributes:
        bucket: that was sent.
        works: to be waited for.
        received: reduced gradients of this rank's part, in the dtype of the wire.
    """

    bucket: Bucket
    works: Sequence[dist.Work]
    received: Tensor


class BucketedReduction:
    """All buckets of an optimizer.

    Args:
        groups: as laid out on this rank.
        options: of the reduction.
        param_names: in the order of the model.
        overlaps: send one bucket while the next one is filled.
        device: of the model.
        offload: whoever adds up reduced gradients on the CPU, if they are there.

    Attributes:
        taken: a gradient of this rank is in the sums since the last step.
        refusal: why gradients of this rank are no good, or None.
        failed: a message could not be sent from a hook.
    """

    def __init__(
        self,
        groups: Sequence[ZeroGroup],
        options: ZeroOptions,
        param_names: Mapping[Tensor, str],
        *,
        overlaps: bool,
        device: torch.device,
        offload: Offload | None = None,
    ) -> None:
        self._offload = offload
        self.taken = self.failed = False
        self.refusal: Exception | None = None
        self._groups, self._options, self._device = groups, options, device
        limit = int(options.reduce_bucket_size) if options.contiguous_gradients else 1
        known = {param: place for place, param in enumerate(param_names)}
        self._buckets = sorted(
            (bucket for group in groups for bucket in cut(group, limit)),
            key=lambda bucket: -min(known[param] for param in bucket.params),
        )
        self._divisors = {
            group: torch.full((), float(group.divisor), device=device) for group in groups
        }
        self._side: torch.cuda.Stream | None = None
        if overlaps and device.type == "cuda":
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._rooms: list[dict[torch.dtype, Tensor]] = [{} for _ in range(2 if overlaps else 1)]
        self._freed: list[torch.cuda.Event | None] = [None] * len(self._rooms)
        self._flights: deque[Flight] = deque()
        self._next = self._number = 0
        self._open = self._filled = False

    def shared(self, partition: Partition) -> list[tuple[int, int, int]]:
        """Buckets in which all ranks of a group meet, in the order in which they are sent.

        Other ranks may have other experts, or other parts of the model.
        """
        ranks = ranks_of(partition.process_group)
        sent = [each for each in self._buckets if ranks <= ranks_of(each.group.process_group)]
        return [(self._groups.index(each.group), each.begin, each.end) for each in sent]

    def buffers(self) -> list[Tensor]:
        """Buffers that have been made; they are kept."""
        apart = [] if self._offload is None else self._offload.buffers()
        return [*apart, *(room for rooms in self._rooms for room in rooms.values())]

    def hooks(self) -> list[RemovableHandle]:
        """Hooks of all parameters, at constant cost: inside `opened`, complete buckets are sent."""
        held = weakref.ref(self)  # the garbage collector does not see what hooks hold
        return [
            param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._arrived, held, number, place)
            )
            for number, bucket in enumerate(self._buckets)
            for place, param in enumerate(bucket.params)
        ]

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let backward send buckets; whoever opens finishes, on every rank."""
        # Sums that are there already are sent with the new gradients, once all of them are in.
        self._open = not self._filled
        try:
            yield
        finally:
            self._open = False

    @staticmethod
    @torch.no_grad()
    def _arrived(held: weakref.ref[BucketedReduction], number: int, place: int, _: Tensor) -> None:
        self = held()
        if self is not None and self._open:
            self._buckets[number].arrived.add(place)
            self.failed = True
            while self._next < len(self._buckets) and self._buckets[self._next].complete:
                self._send_next()
            self.failed = False

    def take(self) -> None:
        """Add all gradients to the sums of this rank, and drop them; nothing is sent.

        Raises:
            RuntimeError: a gradient is sparse. Nothing has changed.
        """
        params = [param for group in self._groups for param in group.params]
        check_dense_gradients(params, "ZeroOptimizer")
        self.taken |= any(param.grad is not None for param in params)
        self._filled = True
        for group in self._groups:
            group.make_sums()
        accumulate_gradients(self._groups)
        drop_gradients(params)

    def finish(self) -> None:
        """Send what has not been sent, and wait until everything is in `reduced`.

        A message for every bucket, whatever this rank has: every rank must call it.
        """
        if self._filled:
            try:
                self.take()
            except RuntimeError as error:
                self.refusal = error
        while self._next < len(self._buckets):
            self._send_next()
        self._land_all()
        if self._filled:
            for group in self._groups:
                group.accumulator.zero_()
        if self._offload is not None:
            self._offload.end_round()
        self._begin_round()

    def clear(self) -> None:
        """Forget all gradients that were taken."""
        self._land_all()
        self._begin_round()
        self.taken = self.failed = False
        self.refusal = None
        for group in self._groups:
            group.accumulator.zero_()
            if self._offload is None:
                group.reduced.zero_()
        if self._offload is not None:
            self._offload.clear([group.reduced for group in self._groups])

    def _begin_round(self) -> None:
        self._next, self._filled = 0, False
        for bucket in self._buckets:
            bucket.arrived.clear()

    def _land_all(self) -> None:
        while self._flights:
            self._land(self._flights.popleft())
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)
        if self._offload is not None:
            self._offload.settle()

    def _send_next(self) -> None:
        """Fill a buffer with the next bucket, and send it."""
        bucket = self._buckets[self._next]
        self._next += 1
        number = self._number
        self._number = (number + 1) % len(self._rooms)
        # Of two buffers the one that was filled before the last one may still be on its way.
        while len(self._flights) == len(self._rooms):
            self._land(self._flights.popleft())
        room = self._room(bucket, number)
        self._fill(bucket, room)
        if self._side is None:
            self._flights.append(self._sent(bucket, room))
            if len(self._rooms) == 1:
                self._land(self._flights.popleft())
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            self._land(self._sent(bucket, room))
            room.record_stream(self._side)
            freed = self._freed[number] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            freed.record()

    def _room(self, bucket: Bucket, number: int) -> Tensor:
        """Memory for a bucket in the dtype of the wire, of which nothing is on its way."""
        dtype = self._options.communication_data_type or bucket.group.flat.dtype
        if not self._options.contiguous_gradients:
            return torch.empty(bucket.numel, dtype=dtype, device=self._device)
        freed = self._freed[number]
        if freed is not None:
            torch.cuda.current_stream(self._device).wait_event(freed)
        rooms = self._rooms[number]
        if dtype not in rooms:
            most = max(each.numel for each in self._buckets)
            rooms[dtype] = torch.empty(most, dtype=dtype, device=self._device)
        return rooms[dtype][: bucket.numel]

    def _fill(self, bucket: Bucket, room: Tensor) -> None:
        """Write this rank's gradients of a bucket, as they are sent, and drop them."""
        group = bucket.group
        if self._filled:
            self._write(group, room, group.accumulator[bucket.begin : bucket.end])
            return
        end = 0
        for param in bucket.params:
            begin, end = end, end + param.numel()
            grad = self._dense(param)
            if grad is None:
                room[begin:end].zero_()
            else:
                self.taken = True
                self._write(group, room[begin:end], grad.detach().reshape(-1))
            param.grad = None
        room[end:].zero_()

    def _dense(self, param: Tensor) -> Tensor | None:
        """The gradient of a parameter; None for one that is refused."""
        try:
            check_dense_gradients([param], "ZeroOptimizer")
        except RuntimeError as error:
            self.refusal = error
            return None
        return param.grad

    def _write(self, group: ZeroGroup, slot: Tensor, grad: Tensor) -> None:
        """Write gradients, divided before they are summed where the options say so."""
        options, sums = self._options, group.reduced.dtype
        if sums not in (grad.dtype, torch.float32):
            grad = grad.to(sums)
        if not options.gradient_average:
            slot.copy_(grad)
        elif options.reduce_scatter or not options.postscale_gradients:
            # Not by a number: a GPU would multiply by its reciprocal, which is rounded.
            divisor = self._divisors[group]
            exact = grad.dtype == slot.dtype and group.divisor <= EXACT
            torch.div(grad if exact else grad.float(), divisor, out=slot)
        else:
            slot.copy_(grad)
            if options.gradient_predivide_factor != 1.0:
                slot.copy_(slot.float() * (1.0 / options.gradient_predivide_factor))

    def _sent(self, bucket: Bucket, room: Tensor) -> Flight:
        """Send a bucket; on one rank there is no message."""
        group, owners = bucket.group, list(bucket.owned())
        ranks = group.process_group
        received = next((room[a:b] for rank, a, b in owners if rank == group.rank), room[:0])
        works: list[dist.Work | None] = []
        if ranks is None or group.world == 1:
            pass
        elif not self._options.reduce_scatter:
            works.append(dist.all_reduce(room, group=ranks, async_op=True))
        elif bucket.whole:
            received = torch.empty_like(received)
            works.append(reduce_scatter(received, room, ranks))
        else:
            works += [
                dist.reduce(room[a:b], group=ranks, group_dst=rank, async_op=True)
                for rank, a, b in owners
            ]
        return Flight(bucket, [work for work in works if work is not None], received)

    def _land(self, flight: Flight) -> None:
        """Add what was received to this rank's sums."""
        for work in flight.works:
            work.wait()
        group, options, received = flight.bucket.group, self._options, flight.received
        if not received.numel():
            return
        first = max(flight.bucket.begin - group.rank * group.partition_size, 0)
        after = not options.reduce_scatter and options.postscale_gradients
        if after and options.gradient_average:
            factor = options.gradient_predivide_factor / group.divisor
            received = (received.float() * factor).to(received.dtype)
        if self._offload is not None:
            self._offload.add(group.reduced, first, received)
        else:
            accumulate_([group.reduced[first : first + received.numel()]], [received])


def ranks_of(group: dist.ProcessGroup | None) -> set[int]:
    """Numbers of the ranks of a group; none where there is no group."""
    return set() if group is None else set(dist.get_process_group_ranks(group))


def reduce_scatter(received: Tensor, given: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Start the sum of a tensor over ranks, of which each receives its part."""
    # torch 2.13 has a new name, and a warning for the old one.
    new = hasattr(dist, "reduce_scatter_single")
    start = getattr(dist, "reduce_scatter_single" if new else "reduce_scatter_tensor")
    return cast("dist.Work | None", start(received, given, group=group, async_op=True))
