"""Parts of ranks in a collective, results from all parts, and buffers in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from twinstep.parity.ranks.arithmetic import Operation, reduced

Parts = Sequence[Sequence[Tensor]]
# None is left alone: a rank's own place in all_gather that holds its input already.
Outputs = Sequence[Tensor | None]
Reduce = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class Request:
    """One rank's part in a collective.

    Attributes:
        collective: its name in `torch.distributed`.
        inputs: that this rank sends, flat.
        outputs: that it writes, flat.
        operation: of a reduction.
        root: rank in the group that sends to all or receives from all.
        agreed: numbers of elements that are the same on all ranks; None where they need not be.
        dtype: of all tensors; None without any.
    """

    collective: str
    inputs: Sequence[Tensor] = ()
    outputs: Outputs = ()
    operation: Operation | None = None
    root: int | None = None
    agreed: tuple[int, ...] | None = ()
    dtype: torch.dtype | None = None

    def signature(self) -> tuple[object, ...]:
        """Facts that are the same on all ranks of a group."""
        name = None if self.operation is None else self.operation.name
        return (self.collective, name, self.root, self.dtype, self.agreed)

    def __str__(self) -> str:
        facts = [] if self.operation is None else [self.operation.name]
        if self.dtype is not None:
            sizes = self.agreed or [part.numel() for part in self.inputs]
            counts = "+".join(map(str, sizes))
            facts += [str(self.dtype).removeprefix("torch."), f"{counts} elements"]
        facts += [] if self.root is None else [f"root {self.root}"]
        return f"{self.collective}({', '.join(facts)})"


def results(requests: Sequence[Request], order: str, places: Sequence[int]) -> list[list[Tensor]]:
    """Values of each rank's outputs.

    Args:
        requests: of all ranks, in order, with the same signature; inputs are snapshots.
        order: of a reduction, a name in `arithmetic.ORDERS`.
        places: ranks in the order in which the reduction takes them.
    """
    first = requests[0]
    inputs = [request.inputs for request in requests]

    def reduce(parts: Sequence[Tensor]) -> Tensor:
        operations = [requests[at].operation for at in places]
        known = [operation for operation in operations if operation is not None]
        return reduced([parts[at] for at in places], known, order)

    return FORMULAS[first.collective](inputs, first.root or 0, reduce)


def _all_reduce(inputs: Parts, root: int, reduce: Reduce) -> list[list[Tensor]]:
    return [[reduce(parts) for parts in zip(*inputs, strict=True)]] * len(inputs)


def _reduce(inputs: Parts, root: int, reduce: Reduce) -> list[list[Tensor]]:
    (total,) = (reduce(parts) for parts in zip(*inputs, strict=True))
    return [[total] if rank == root else [] for rank in range(len(inputs))]


def _reduce_scatter(inputs: Parts, root: int, reduce: Reduce) -> list[list[Tensor]]:
    """Each rank's inputs are as many pieces as there are ranks, for each of its outputs."""
    count = len(inputs)
    pieces: list[Sequence[Tensor]] = []
    for start in range(0, len(inputs[0]), count):
        own = [sent[start : start + count] for sent in inputs]
        total = reduce([torch.cat(list(sent)) for sent in own])
        pieces.append(torch.split(total, [piece.numel() for piece in own[0]]))
    return [[piece[rank] for piece in pieces] for rank in range(count)]


def _all_gather(inputs: Parts, root: int, reduce: Reduce) -> list[list[Tensor]]:
    return [[part for parts in zip(*inputs, strict=True) for part in parts]] * len(inputs)


def _gather(inputs: Parts, root: int, reduce: Reduce) -> list[list[Tensor]]:
    whole = [parts[0] for parts in inputs]
    return [whole if rank == root else [] for rank in range(len(inputs))]


def _broadcast(inputs: Parts, root: int, reduce: Reduce) -> list[list[Tensor]]:
    return [[] if rank == root else list(inputs[root]) for rank in range(len(inputs))]


def _scatter(inputs: Parts, root: int, reduce: Reduce) -> list[list[Tensor]]:
    return [[inputs[root][rank]] for rank in range(len(inputs))]


def _all_to_all(inputs: Parts, root: int, reduce: Reduce) -> list[list[Tensor]]:
    return [[parts[rank] for parts in inputs] for rank in range(len(inputs))]


def _nothing(inputs: Parts, root: int, reduce: Reduce) -> list[list[Tensor]]:
    return [[] for _ in inputs]


FORMULAS: dict[str, Callable[[Parts, int, Reduce], list[list[Tensor]]]] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_gather": _all_gather,
    "all_gather_coalesced": _all_gather,
    "all_gather_into_tensor": _all_gather,
    "gather": _gather,
    "broadcast": _broadcast,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all,
    "barrier": _nothing,
    "point_to_point": _broadcast,
}


def flat(tensor: Tensor) -> Tensor:
    """The tensor's own memory as one dimension.

    Raises:
        ValueError: it is not strided and contiguous, as NCCL wants it.
    """
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError("a tensor is not contiguous, but groups send contiguous memory only")
    return tensor.detach().reshape(-1)


@contextmanager
def unseen() -> Iterator[None]:
    """Run what a real group does below torch's operators: no mode of the caller sees it."""
    with torch.inference_mode(), torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def octets(tensor: Tensor) -> Tensor:
    """Bytes of a flat tensor."""
    return tensor.view(torch.uint8)


def poison(output: Tensor) -> None:
    """Fill with NaN, or with the byte 0xA5 where there is none."""
    is_float = output.is_floating_point() or output.is_complex()
    octets(output).fill_(1 if output.dtype == torch.bool else 0xFF if is_float else 0xA5)


def is_poison(output: Tensor) -> bool:
    """True if it has been left as `poison` filled it."""
    wanted = torch.empty_like(output)
    poison(wanted)
    return torch.equal(octets(output), octets(wanted))


def check_memory(request: Request) -> None:
    """Require outputs that lie apart from each other, and on an input wholly or not at all.

    Raises:
        ValueError: two overlap.
    """
    outputs = [span(output) for output in request.outputs if output is not None]
    for (_, end), (start, _) in zip(sorted(outputs), sorted(outputs)[1:], strict=False):
        if start < end:
            raise ValueError("two outputs lie in the same memory")
    for given in map(span, request.inputs):
        for output in outputs:
            if given != output and max(given[0], output[0]) < min(given[1], output[1]):
                raise ValueError("an output lies on a part of an input")


def span(tensor: Tensor) -> tuple[int, int]:
    """First address, and that behind the last; of nothing, none."""
    start = tensor.data_ptr() if tensor.numel() else 0
    return start, start + tensor.numel() * tensor.element_size()
