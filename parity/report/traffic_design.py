"""Bytes that the design allows each launch: tensors that it reads once and writes once.

The numbers follow from the tensors' dtypes. Everything else that a call moves (pointer tables,
coefficients, step counters, partial sums) may cost at most `REST` bytes per parameter from
`REST_AT` parameters on: half a percent of the 30 bytes of a whole 16-bit step with clipping. Every
warp counts what it reads, so a table row that the four warps of a block share counts four times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

REST = 0.005 * 30
REST_AT = 1 << 20


@dataclass(frozen=True)
class Pass:
    """One pass over the parameters.

    Attributes:
        launch: what the names of the launched kernels start with.
        read: list arguments of which every element is read once.
        written: list arguments of which every element is written once.
    """

    launch: str
    read: tuple[str, ...]
    written: tuple[str, ...] = ()


_ADAM = Pass(
    "adam",
    ("params", "grads", "exp_avgs", "exp_avg_sqs"),
    ("params", "exp_avgs", "exp_avg_sqs", "copies"),
)
_REMAINDER = Pass(
    "adam",
    (*_ADAM.read, "remainders"),
    ("params", "exp_avgs", "exp_avg_sqs", "remainders"),
)
_LAMB = (
    Pass("lamb_moments", _ADAM.read, ("exp_avgs", "exp_avg_sqs")),
    Pass("lamb_weights", ("params", "exp_avgs", "exp_avg_sqs"), ("params", "copies")),
)
_REDUCE = Pass("reduce", ("grads",))

DESIGN: dict[str, tuple[Pass, ...]] = {
    "sgd_step": (Pass("sgd", ("params", "grads", "momentums"), ("params", "momentums", "copies")),),
    "adam_step": (_ADAM,),
    "adamw_step": (_ADAM,),
    "adamw_remainder_step": (_REMAINDER,),
    "lamb_step": _LAMB,
    "apex_lamb_step": tuple(replace(one, launch=f"apex_{one.launch}") for one in _LAMB),
    "mixed_step": (_REDUCE, _ADAM),
    "global_norm": (_REDUCE,),
    "unscale": (Pass("unscale", ("grads",), ("grads",)),),
    "flatten": (Pass("copy", ("tensors",), ("flat",)),),
    "unflatten": (Pass("copy", ("flat",), ("tensors",)),),
    "accumulate": (Pass("accumulate", ("accumulators", "grads"), ("accumulators",)),),
    "cast_copy": (Pass("cast", ("sources",), ("copies",)),),
}


def bytes_by_list(
    operation: str, launch: str, lists: Mapping[str, Sequence[Tensor]]
) -> dict[str, tuple[int, int]]:
    """Bytes that all launches of that name together read and write, by list argument.

    Args:
        operation: name of the operation.
        launch: name of the launched kernel.
        lists: the call's arguments; an absent list costs nothing.

    Returns:
        List argument -> (read, written). Empty for a launch that does not pass over parameters.
    """
    moved: dict[str, tuple[int, int]] = {}
    for one in DESIGN.get(operation, ()):
        if launch.startswith(one.launch) and "prepare" not in launch:
            for name in dict.fromkeys(one.read + one.written):
                size = sum(tensor.numel() * tensor.element_size() for tensor in lists[name])
                if size:
                    moved[name] = (size * (name in one.read), size * (name in one.written))
    return moved


def total(operation: str, lists: Mapping[str, Sequence[Tensor]]) -> int:
    """Bytes of all passes of one call."""
    return sum(
        read + written
        for one in DESIGN.get(operation, ())
        for read, written in bytes_by_list(operation, one.launch, lists).values()
    )
