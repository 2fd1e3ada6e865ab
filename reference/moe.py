"""Gradients in the parts whose sums are added over the same ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from twinstep.contract.moe import expert_name
from twinstep.contract.parallel import ExpertGroups
from twinstep.reference.norms import Part


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
        name = expert_name(param)
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
