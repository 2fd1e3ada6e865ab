"""Mixture of experts: which parameters are experts, and groups that hold nothing else.

An expert's parameter carries `allreduce` = False, and `group_name`, the name of the expert-parallel
group that it is split over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch.distributed as dist
from torch import Tensor

from twinstep.reference.norm import Part

ParamGroup = dict[str, object]
ExpertGroups = Mapping[str, dist.ProcessGroup]
MAX_GROUP_SIZE = 178956971


def is_moe_param(param: Tensor) -> bool:
    """Whether the parameter belongs to an expert."""
    return hasattr(param, "allreduce") and not param.allreduce


def split_shared_and_expert(params: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Shared parameters and those of experts, each in order."""
    shared: list[Tensor] = []
    experts: list[Tensor] = []
    for param in params:
        (experts if is_moe_param(param) else shared).append(param)
    return shared, experts


def gradient_parts(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    model_groups: Sequence[dist.ProcessGroup],
    expert_groups: ExpertGroups,
    expert_data_groups: ExpertGroups,
) -> list[Part]:
    """Gradients in the parts whose sums are added over the same ranks.

    Shared gradients are added over the model-parallel groups. Experts of each name are added over
    their expert-parallel group before, since every rank of it holds others, and averaged over their
    expert-data-parallel group, whose ranks hold the same.

    Args:
        params: one per gradient, whose marks say where it belongs.
        grads: of this rank.
        model_groups: for all gradients.
        expert_groups: by name.
        expert_data_groups: by name; an expert whose name is in neither is on this rank alone.
    """
    named: dict[str | None, list[Tensor]] = {None: []}
    for param, grad in zip(params, grads, strict=True):
        name = str(getattr(param, "group_name", "")) if is_moe_param(param) else None
        known = name in expert_groups or name in expert_data_groups
        named.setdefault(name if known else None, []).append(grad)
    parts = [Part(tensors=named[None], groups=model_groups)]
    # Collectives must be met in one order on all ranks: every known name has its part, no other.
    for name in sorted({*expert_groups, *expert_data_groups}):
        parts.append(
            Part(
                tensors=named.get(name, []),
                experts=[expert_groups[name]] if name in expert_groups else [],
                replicas=expert_data_groups.get(name),
                groups=model_groups,
            )
        )
    return parts


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
        for name in dict.fromkeys(str(getattr(expert, "group_name", "")) for expert in experts):
            mine = [expert for expert in experts if str(getattr(expert, "group_name", "")) == name]
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
