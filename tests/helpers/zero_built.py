"""ZeroOptimizer on ranks: built with few words, and its weights, state and gradients by name."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.sides import CLASSES
from twinstep.parity.cases.fixed_inputs import bits, moderate
from twinstep.reference.optimizers.zero import ZeroOptimizer

SIDE = ContextVar("side", default="reference")
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
Group = dist.ProcessGroup | None


def sided(name: str) -> Any:
    """A class of the side that tests are about."""
    return CLASSES[SIDE.get()][name]


def place(group: Group) -> int:
    """Rank in a group; 0 without one."""
    return 0 if group is None else dist.get_rank(group)


def built(
    group: Group,
    sizes: Sequence[int] = (4, 3, 5),
    *,
    inside: str = "SGD",
    dtype: torch.dtype = HALF,
    split: int | None = None,
    **options: Any,
) -> tuple[list[nn.Parameter], ZeroOptimizer]:
    """Parameters p0, p1, ... and their optimizer; SGD at rate 1, or another at 0.1.

    Args:
        group: data-parallel ranks.
        sizes: of the parameters.
        inside: name of the inner optimizer's class.
        dtype: of the parameters.
        split: number of parameters in the first of two groups; None for one group.
        options: of the constructor.

    The class is that of the side that tests are about; its names are those of the reference.
    """
    params = [nn.Parameter(moderate(size, slot, dtype)) for slot, size in enumerate(sizes)]
    cut = [params] if split is None else [params[:split], params[split:]]
    groups: list[dict[str, Any]] = [{"params": each} for each in cut]
    inner: Any = {
        "SGD": lambda: torch.optim.SGD(groups, lr=1.0),
        "momentum": lambda: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        "Adam": lambda: torch.optim.Adam(groups, lr=0.1),
        "FusedAdam": lambda: sided("FusedAdam")(groups, lr=0.1, weight_decay=0.1),
    }[inside]()
    names = {param: f"p{slot}" for slot, param in enumerate(params)}
    given = {"param_names": names, "dp_process_group": group, "verbose": False, **options}
    return params, sided("ZeroOptimizer")(inner, **given)


def fill(params: Sequence[nn.Parameter], value: float) -> None:
    """The same gradient everywhere."""
    for param in params:
        param.grad = torch.full_like(param, value)


def moves(
    params: Sequence[nn.Parameter], optimizer: ZeroOptimizer, micros: Sequence[float]
) -> list[float]:
    """Distances by which a step moves the first master element of each parameter.

    Args:
        params: p0, p1, ...
        optimizer: of these.
        micros: gradients of this rank, by micro-batch.
    """
    before = masters(params, optimizer)
    for value in micros:
        fill(params, value)
        if optimizer.partition_gradients:
            optimizer.reduce_gradients()
        else:
            optimizer.fill_grad_accum_attribute()
    optimizer.step()
    after = masters(params, optimizer)
    return [(old - new)[0].item() for old, new in zip(before, after, strict=True) if len(old)]


def masters(params: Sequence[nn.Parameter], optimizer: ZeroOptimizer) -> list[torch.Tensor]:
    """Whole masters, float64; a collective."""
    return [optimizer.get_full_hp_param(f"p{slot}").double() for slot in range(len(params))]


def trained(params: Sequence[nn.Parameter], optimizer: ZeroOptimizer, steps: range) -> None:
    """Steps with numbered gradients, of which every rank has the same."""
    for number in steps:
        for slot, param in enumerate(params):
            param.grad = moderate(param.numel(), 10 * number + slot, param.dtype)
        optimizer.step()


def seen(params: Sequence[nn.Parameter], optimizer: ZeroOptimizer) -> list[object]:
    """Weights, whole masters and states, scale, overflow and norm; a collective."""
    names = [f"p{slot}" for slot in range(len(params))]
    found: list[object] = [bits(param.detach()) for param in params]
    found += [bits(optimizer.get_full_hp_param(name)) for name in names]
    for group in optimizer.groups:
        state = optimizer.state.get(group.master, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == group.master.shape:
                wanted = [name for name in names if name in group.names]
                found += [bits(optimizer.get_full_hp_param(name, key)) for name in wanted]
            else:
                found.append(str(value))
    norm = optimizer.get_global_norm()
    return [*found, optimizer.loss_scale, optimizer.overflow, str(norm), optimizer.clip_grad]
