"""All ranks or none: what one rank cannot do, no rank does."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from inspect import signature
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist

from twinstep.contract.fragments import Partition
from twinstep.contract.parallel import Groups, data_parallel_group, groups_given

T = TypeVar("T")
P = ParamSpec("P")
NUMBERED = 2.0  # a refusal by the rank of number 0
ALONE = (-math.inf, -math.inf)  # a number that this rank does not have, and its negative


def on_all_ranks(
    read: Callable[[], T],
    groups: Iterable[dist.ProcessGroup | None],
    device: torch.device,
    *,
    same: Mapping[str, Callable[[T], float | None]] = MappingProxyType({}),
) -> T:
    """Return what `read` returns, if it does so on every rank; with groups, waits for the device.

    A rank that stopped alone would leave the others waiting in their next collective for ever.

    Args:
        read: changes nothing that matters if another rank refuses.
        groups: of the ranks that must agree; every rank names them in the same order.
        device: that the groups communicate from.
        same: by name, a number of the result that all ranks should have alike; None where a rank
            has none.

    Raises:
        ValueError: another rank has had an error, or has another number.
        Exception: that of `read`.
    """
    asked = [group for group in dict.fromkeys(groups) if group is not None]
    result, _ = largest_on_all_ranks(read, asked, device, largest=lambda _: 0.0, same=same)
    return result


def largest_on_all_ranks(
    read: Callable[[], T],
    groups: Groups,
    device: torch.device,
    *,
    largest: Callable[[T], float],
    same: Mapping[str, Callable[[T], float | None]],
) -> tuple[T, float]:
    """Return what `read` returns, and the largest of a number of the results of all ranks.

    Args:
        read: as in `on_all_ranks`.
        groups: one message over each, in turn.
        device: that the groups communicate from.
        largest: the number of a result.
        same: as in `on_all_ranks`.

    Raises:
        ValueError: another rank has had an error, or has another number of `same`.
        Exception: that of `read`.
    """
    failure: Exception | None = None
    most = -math.inf
    numbers: list[float | None] = [None] * len(same)
    try:
        result = read()
        most = largest(result)
        numbers = [number(result) for number in same.values()]
    except Exception as error:
        failure = error
    if groups:
        found = [ALONE if number is None else (number, -number) for number in numbers]
        told = [_refusal() if failure else 0.0, most, *(end for pair in found for end in pair)]
        worst = torch.tensor(told, dtype=torch.float64, device=device)
        for group in groups:
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
        if failure is None:
            refused, most, *ends = worst.tolist()
            _raise_told(refused, zip(same, ends[::2], ends[1::2], strict=True))
    if failure is not None:
        raise failure
    return result, most


def _raise_told(refused: float, ends: Iterable[tuple[str, float, float]]) -> None:
    """Raise what other ranks have told: a refusal, or largest and negated least that differ."""
    if refused:
        raise refused_elsewhere(int(refused - NUMBERED) if refused >= NUMBERED else None)
    for name, most, least in ends:
        if most not in (-least, -math.inf):
            raise ValueError(
                f"{name} is {-least:.17g} on one rank and {most:.17g} on another, but should be "
                "the same on all"
            )


def refused_elsewhere(rank: int | None) -> ValueError:
    """The error of ranks that could, where another could not.

    Args:
        rank: number of the other in the world, where it is known.
    """
    which = "" if rank is None else f" ({rank})"
    return ValueError(
        f"another rank{which} cannot, and names the reason: all ranks should, or none"
    )


def _refusal() -> float:
    """A refusal by this rank, with its number in the world where it has one."""
    return NUMBERED + dist.get_rank() if dist.is_initialized() else 1.0


def constructed_by_all(construct: Callable[P, None]) -> Callable[P, None]:
    """A constructor of an optimizer around another one, which all ranks of its groups end alike.

    Groups are kept as `ranks`, all arguments in `_built_with`, and `_agree` is called once none has
    refused. Parameters of a rank that could, while another could not, may lie in new memory; their
    values are the same. A `dp_process_group` that is not given is `data_parallel_group`.
    """
    splits = "dp_process_group" in signature(construct).parameters

    @wraps(construct)
    def run(*args: P.args, **options: P.kwargs) -> None:
        made: Any = args[0]
        if splits:
            group, mpu = options.get("dp_process_group"), options.get("mpu")
            options["dp_process_group"] = data_parallel_group(cast(Any, group), cast(Any, mpu))
        made.ranks = groups_given(options)
        others = {name: given for name, given in options.items() if name != "init_optimizer"}
        made._built_with = lambda: others
        inside = args[1] if len(args) > 1 else options.get("init_optimizer")
        on_all_ranks(lambda: construct(*args, **options), made.ranks, device_of(inside))
        made._agree()
        made._name_unneeded()

    return run


def agree_on_layouts(
    groups: Iterable[Partition],
    ranks: Groups,
    buckets: Callable[[Partition], object] | None = None,
) -> None:
    """Require the same layout of all ranks that split a group.

    Ranks with other parameters, or in another order, would gather each other's weights.

    Args:
        groups: laid out.
        ranks: groups of all ranks that construct.
        buckets: those in which the ranks of a group meet, in order, where there are some.

    Raises:
        ValueError: ranks of a group have other names, sizes or dtypes; on every rank.
    """
    failures: list[Exception] = []
    device = torch.device("cpu")
    for index, group in enumerate(groups):
        sizes = [param.numel() for param in group.params]
        facts = [group.names, sizes, [param.dtype for param in group.params]]
        text = repr(facts if buckets is None else [*facts, buckets(group)])
        # As many bits as a float64 holds.
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
        name = f"group {index}: digest of the names, sizes and dtypes of its parameters"
        name += "" if buckets is None else ", and of their buckets"
        device = group.flat.device
        try:
            on_all_ranks(partial(int, digest), [group.process_group], device, same={name: float})
        except ValueError as error:
            # All ranks have to meet the collectives of the other groups.
            failures.append(error)

    def refuse() -> None:
        for failure in failures:
            raise failure

    on_all_ranks(refuse, ranks, device)


def device_of(optimizer: object) -> torch.device:
    """The device of the first parameter of an optimizer; the CPU if there is none."""
    for group in getattr(optimizer, "param_groups", ()):
        for param in group["params"]:
            return cast(torch.device, param.device)
    return torch.device("cpu")
