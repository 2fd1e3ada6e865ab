"""Lists with one tensor per parameter, and what every optimizer step does to them.

Read to fp32, update, round each result once; or skip the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from twinstep.reference.arithmetic import fp32

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


def check_lengths(
    where: str,
    required: dict[str, Sequence[Tensor]],
    optional: dict[str, Sequence[Tensor]] | None = None,
) -> None:
    """Require lists of equal length and tensors of equal shape, index by index.

    Args:
        where: the operation, for the message.
        required: lists by name; all have the length of the first.
        optional: lists by name; each has that length or is empty.

    Raises:
        ValueError: a length or a shape differs.
    """
    first, *_ = required
    lead = required[first]
    given = {name: tensors for name, tensors in (optional or {}).items() if len(tensors)}
    for name, tensors in {**required, **given}.items():
        if len(tensors) != len(lead):
            raise ValueError(
                f"{name} has {len(tensors)} tensors, but should have {len(lead)} "
                f"like {first} [{where}]"
            )
        for index, (tensor, like) in enumerate(zip(tensors, lead, strict=True)):
            if tensor.shape != like.shape:
                raise ValueError(
                    f"{name}[{index}] has shape {tuple(tensor.shape)}, but should have "
                    f"{tuple(like.shape)} like {first}[{index}] [{where}]"
                )


def check_steps(where: str, steps: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    """Require one step counter per parameter.

    Raises:
        ValueError: there are more or fewer.
    """
    if len(steps) != len(params):
        raise ValueError(
            f"steps has {len(steps)} tensors, but should have {len(params)} like params [{where}]"
        )
