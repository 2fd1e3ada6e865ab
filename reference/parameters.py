"""The protocol of every optimizer step: read to fp32, update, round each result once; or skip."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from twinstep.reference.arithmetic import fp32
from twinstep.reference.lists import check_lengths, check_steps

Update = Callable[..., tuple[Tensor, ...]]
Lists = tuple[list[Tensor], ...]


def for_each_parameter(
    where: str,
    update: Update,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    state: Mapping[str, Sequence[Tensor]],
    copies: Sequence[Tensor],
    steps: Sequence[Tensor],
    found_inf: Tensor,
) -> Lists:
    """One step of every parameter.

    Args:
        where: the operation, for messages.
        update: (t, p, g, *state) -> (p, *state) of one parameter, all fp32; t counts from 1.
        params: fp32, or fp16/bf16 without masters; any shapes.
        grads: fp32, fp16 or bf16, one per parameter.
        state: lists of state tensors by name, one tensor per parameter.
        copies: low-precision model weights, one per parameter, or an empty list.
        steps: completed steps of each parameter, int64, shape ().
        found_inf: not 0 skips the step: every output has the bits of its input.

    Returns:
        New params, each list of state in order, copies, steps. Nothing is mutated. A parameter and
        its copy are rounded once, from the same fp32 result.

    Raises:
        ValueError: a length or a shape differs.
    """
    check_lengths(where, {"params": params, "grads": grads, **state}, {"copies": copies})
    check_steps(where, steps, params)
    if found_inf.item() != 0:
        written = (params, *state.values(), copies, steps)
        return tuple([tensor.clone() for tensor in tensors] for tensors in written)
    new_params, new_copies, new_steps = list[Tensor](), list[Tensor](), list[Tensor]()
    new_state: list[list[Tensor]] = [[] for _ in state]
    targets: Sequence[Tensor | None] = copies or [None] * len(params)
    rows = zip(params, grads, targets, steps, *state.values(), strict=True)
    for param, grad, copy, step, *old in rows:
        p, *new = update(int(step.item()) + 1, fp32(param), fp32(grad), *map(fp32, old))
        new_params.append(p.to(param.dtype))
        for tensors, after, before in zip(new_state, new, old, strict=True):
            tensors.append(after.to(before.dtype))
        if copy is not None:
            new_copies.append(p.to(copy.dtype))
        new_steps.append(step + 1)
    return (new_params, *new_state, new_copies, new_steps)
