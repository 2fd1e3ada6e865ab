"""Parts that worlds are built of: parameters, their copies, and the side that a class is on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import Parameter

from twinstep.parity.sequences.fills import DTYPES, Dice, filled

SEEDS = range(10_000)
SHAPES = ((3,), (1,), (2, 3), (17,), (0,), (), (130,), (2, 3, 4), (700,), (2, 1, 3, 5), (3, 259))
# More than 65,536 elements, once in many groups.
LARGISH, RARELY = (257, 257), (0,) * 39 + (1,)
# More than 2^18 elements.
LARGE = (517, 509)
# Groups of an instance; seldom more than tables of 8 or 16 hold.
GROUPS = (*(1, 1, 2, 3) * 50, 20)
# Parameters of a group. Crowds fill tables of 64, 128 or 256, or of 110, or are more than any of
# 512 holds, frozen ones apart.
SMALL, CROWDS = (*(1, 2, 3) * 6, 12), {"crowd of 256": 256, "crowd of 330": 330, "crowd": 600}
# A first group that is a crowd or large costs much: sequences with one are few and short.
EXTENTS = (*("",) * 796, *CROWDS, "large")
Group = dict[str, object]
# Reason why an argument is passed by no action.
RANKS = "passed by sequences over ranks"
# Counters at which 24 and 31 bits are full, and steps since an overflow around a usual window.
COUNTS, WINDOWS = (2**24 - 2, 2**31 - 2, 1000), (1, 998, 999, 1000)
# Attributes by which models mark their parameters.
MARKS = (
    *("allreduce", "group_name", "ds_pipe_replicated"),
    *("model_parallel", "tensor_model_parallel"),
)
# Counters at which 3e-5 of the bias is left to correct, each with another usual beta.
FADED = (205, 7_900, 10_300, 11_300, 205_000)
# Arguments of torch's backward besides the loss; or it runs again where the graph is gone.
GRAPHS = ("", "", "retain", "create", "again")


def parameters(
    dice: Dice,
    dtype: str,
    device: str,
    seed: int,
    together: bool,
    extent: str = "",
) -> list[Parameter]:
    """Some parameters, rarely more than three; `mixed` takes fp16, bf16 and fp32 in turn."""
    turns = list(DTYPES.values()) if dtype == "mixed" else [DTYPES[dtype]]
    shapes = [dice.pick(SHAPES) for _ in range(dice.pick(SMALL))]
    shapes += [LARGISH] * dice.pick(RARELY)
    if extent in CROWDS:
        shapes = [dice.pick(SHAPES[:3]) for _ in range(CROWDS[extent])]
    elif extent == "large":
        shapes = [LARGE, *shapes[:1]]
    values = [
        filled(shape, turns[index % len(turns)], "ordinary", seed + index if seed else 0)
        for index, shape in enumerate(shapes)
    ]
    if dice.pick((False, False, True)):
        values = [value.transpose(0, -1) if value.dim() > 1 else value for value in values]
    elif together and len(turns) == 1:
        flat = torch.cat([value.reshape(-1) for value in values]).to(device)
        parts = torch.split(flat, [value.numel() for value in values])
        values = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    return [Parameter(value.to(device)) for value in values]


def like(param: Parameter) -> Parameter:
    """A copy with memory and marks of its own."""
    copied = Parameter(param.detach().clone())
    for name in MARKS:
        if hasattr(param, name):
            setattr(copied, name, getattr(param, name))
    copied.grad = None if param.grad is None else param.grad.clone()
    return copied


def train(params: Sequence[Parameter], flags: Sequence[bool]) -> None:
    """Freeze parameters, or train them."""
    for param, trained in zip(params, flags, strict=True):
        param.requires_grad_(trained)


def move(params: Sequence[Parameter], every: bool) -> None:
    """Give parameters, or every second one, other memory with the same values."""
    for param in params[:: 1 if every else 2]:
        param.data = param.detach().clone()


def side_of(cls: Callable[..., object]) -> str:
    """The package a class derives from; what it is built of comes from there, or else from ours."""
    homes = [kind.__module__.split(".")[:2] for kind in cast(type, cls).__mro__]
    sides = (home[1] for home in homes if home[0] == "twinstep")
    return next((side for side in sides if side in ("reference", "fast")), "reference")


def optimizers_of(side: str) -> str:
    """The package that holds the optimizers of a side."""
    return f"twinstep.{side}.optimizers"


def left_out(dice: Dice, given: Mapping[str, object]) -> dict[str, object]:
    """Arguments without some of them, but with the parameters."""
    return {k: v for k, v in given.items() if k == "params" or dice.pick((False, True))}


FLAGS = ("create_graph", "retain_graph")


def add_to(params: Sequence[Parameter]) -> None:
    """Give expanded gradients memory of their own: autograd adds nothing to others."""
    for param in params:
        if param.grad is not None and not param.grad.is_sparse and 0 in param.grad.stride():
            param.grad = param.grad.contiguous()


def curved(products: Tensor, graph: str) -> Tensor:
    """Terms of a loss: their squares where gradients get a graph, which only those of a curve have.

    Gradients should not depend on the loss itself: a sum's order is another on more threads.
    """
    return products * products if graph == "create" else products


def backward_twice(
    backward: Callable[..., None], loss: Tensor, graph: str, order: Sequence[str] = FLAGS
) -> None:
    """Run backward; a second time if the graph is retained, or to see that it is not.

    Args:
        backward: takes the loss, `create_graph` and `retain_graph`.
        loss: a scalar.
        graph: one of GRAPHS.
        order: of these two; that of a retained graph gets them by place. Empty: by name alone.
    """
    if not loss.requires_grad:
        return
    with warnings.catch_warnings():
        # torch remarks on gradients that are laid out otherwise than their parameter, and on cycles
        # of graphs that it creates.
        warnings.simplefilter("ignore", UserWarning)
        flags = {"create_graph": graph == "create", "retain_graph": graph == "retain"}
        if graph == "retain" and order:
            backward(loss, *map(flags.__getitem__, order))
        else:
            backward(loss, **flags)
        if graph in ("retain", "again"):
            backward(loss, create_graph=False, retain_graph=False)
