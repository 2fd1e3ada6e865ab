"""Mixture of experts: which parameters are experts, and groups that hold nothing else.

An expert's parameter carries `allreduce` = False, and `group_name`, the name of the expert-parallel
group that it is split over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from torch import Tensor

ParamGroup = dict[str, object]
MAX_GROUP_SIZE = 178956971


def is_moe_param(param: Tensor) -> bool:
    """True if the parameter belongs to an expert."""
    return not getattr(param, "allreduce", True)


def expert_name(param: Tensor) -> str | None:
    """Name of the expert-parallel group that a parameter is split over; None of shared ones."""
    return str(getattr(param, "group_name", "")) if is_moe_param(param) else None


def split_shared_and_expert(params: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Shared parameters and those of experts, each in order."""
    shared: list[Tensor] = []
    experts: list[Tensor] = []
    for param in params:
        (experts if is_moe_param(param) else shared).append(param)
    return shared, experts


def expert_of_group(options: Mapping[str, object], has_moe_layers: bool, where: str) -> str | None:
    """Name of the experts that a group marked `moe` holds; None of a shared group.

    Raises:
        ValueError: it holds something else.
    """
    if not (has_moe_layers and options.get("moe")):
        return None
    if not all(map(is_moe_param, cast(Iterable[Tensor], options["params"]))):
        raise ValueError(f"group is marked moe, but not all its parameters are [{where}]")
    return str(options.get("name", ""))


def check_has_experts(experts: Iterable[str | None], where: str) -> None:
    """Require a group of experts.

    Raises:
        ValueError: there is none.
    """
    if not any(experts):
        raise ValueError(
            "has_moe_layers=True, but no group is marked moe; split_moe_groups marks them "
            f"[{where}]"
        )


def split_moe_groups(
    groups: ParamGroup | Sequence[ParamGroup], *, max_group_size: int | None = MAX_GROUP_SIZE
) -> list[ParamGroup]:
    """Parameter groups in which experts have groups of their own, marked `moe`.

    The given groups keep their shared parameters and come first; each expert name then gets groups
    with the options of the group its parameters came from, of at most max_group_size elements (a
    larger tensor has a group to itself). No group of experts is empty. Nothing is mutated.

    Raises:
        ValueError: something given is no group.
    """
    given = [groups] if isinstance(groups, dict) else list(groups)
    for index, group in enumerate(given):
        if not isinstance(group, dict) or "params" not in group:
            raise ValueError(
                f"groups[{index}] is a {type(group).__name__}, but should be a group with params "
                f"[split_moe_groups]"
            )
    shared_groups: list[ParamGroup] = []
    expert_groups: list[ParamGroup] = []
    for group in given:
        params = cast(list[Tensor], list(cast(Iterable[Tensor], group["params"])))
        shared, experts = split_shared_and_expert(params)
        shared_groups.append({**group, "params": shared})
        for name in dict.fromkeys(map(expert_name, experts)):
            mine = [expert for expert in experts if expert_name(expert) == name]
            for piece in _pieces(mine, max_group_size):
                expert_groups.append({**group, "name": name, "moe": True, "params": piece})
    return [*shared_groups, *expert_groups]


def _pieces(params: Sequence[Tensor], limit: int | None) -> list[list[Tensor]]:
    pieces: list[list[Tensor]] = []
    size = 0
    for param in params:
        fits = limit is None or size + param.numel() <= limit
        if not pieces or not fits:
            pieces.append([])
            size = 0
        pieces[-1].append(param)
        size += param.numel()
    return pieces
