"""State dicts of the optimizers with moments: their own, torch's, DeepSpeed's and apex's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import cast

import torch
from torch import Tensor

from twinstep.contract.checkpoint.inner import (
    check_options,
    completed,
    counts_for_groups,
    own_counters,
)
from twinstep.contract.moments import MOMENTS, State, StateDict, whole_steps
from twinstep.contract.tensors import check_in_memory


@contextmanager
def loading_as_stored(
    optimizer: torch.optim.Optimizer, initial: Callable[[Tensor], State]
) -> Iterator[None]:
    """Let `load_state_dict` inside the block keep every state tensor in the dtype it is stored in.

    torch rounds every loaded state tensor to its parameter's dtype: fp32 moments of an fp16
    parameter would lose 13 bits, and small second moments would become 0. Here state is taken from
    the dict itself, after all pre-hooks and before all post-hooks, and copied. Options that a file
    lacks stay as they are: torch's Adam has no `bias_correction`. apex keeps one counter for each
    group, DeepSpeed with its last parameter, which becomes that of each of its parameters where a
    class has them; a class that counts as apex does takes it as it is, and 0 where a file has none,
    as before apex's first step.

    Args:
        optimizer: whose state is loaded.
        initial: makes the state of a parameter.

    Raises:
        ValueError: the dict is none of an optimizer, has other options, or asks for what a class
            here cannot do; a counter counts no steps, or a moment is missing or has another shape.
            The optimizer is unchanged.
    """
    loaded: dict[Tensor, State] = {}

    def take(_: torch.optim.Optimizer, given: StateDict) -> StateDict:
        found = _completed(optimizer, given)
        loaded.update(_restored(optimizer, found, initial))
        return found

    hooks = (
        optimizer.register_load_state_dict_pre_hook(take),
        optimizer.register_load_state_dict_post_hook(
            lambda _: optimizer.state.update(loaded), prepend=True
        ),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def marked(optimizer: torch.optim.Optimizer, given: StateDict) -> StateDict:
    """A dict of `state_dict`, whose groups have a `step` of 0 where they share a counter.

    DeepSpeed's `FusedAdam` writes the same; who counts for each parameter knows its files by it.
    """
    if counts_for_groups(optimizer):
        for group in cast("list[dict[str, object]]", given["param_groups"]):
            group["step"] = 0
    return given


def _completed(optimizer: torch.optim.Optimizer, given: StateDict) -> StateDict:
    """The dict with all options of each group, and a counter for each parameter."""
    where = f"{type(optimizer).__name__}.load_state_dict"
    theirs = cast("list[dict[str, object]]", given.get("param_groups"))
    # Parameters have names instead of numbers in torch.distributed.checkpoint.
    if not (
        isinstance(given.get("state"), dict)
        and isinstance(theirs, list)
        and all(isinstance(group, dict) and "params" in group for group in theirs)
    ):
        raise ValueError(f"a state and param_groups should be there, but are not [{where}]")
    if len(theirs) != len(optimizer.param_groups):
        return given  # torch refuses this, right after, with its own message
    pairs = zip(optimizer.param_groups, theirs, strict=True)
    groups = [completed(optimizer, *pair) for pair in pairs]
    state = dict(cast("dict[object, Mapping[str, object]]", given["state"]))
    rows = zip(optimizer.param_groups, groups, theirs, strict=True)
    for index, (mine, group, saved) in enumerate(rows):
        check_options(optimizer, saved, group, f"group {index}, {where}")
        if "step" in mine:
            group["step"] = whole_steps(saved.get("step", 0), f"group {index}, {where}")
            continue
        counter, numbers = group.pop("step", None), cast("list[object]", group["params"])
        for number in numbers if counter is not None else ():
            if state.get(number):
                state[number] = {"step": counter, **state[number]}
        if counter is not None and not counts_for_groups(optimizer):
            state |= own_counters([numbers], state)
    return {**given, "state": state, "param_groups": groups}


def _restored(
    optimizer: torch.optim.Optimizer, given: StateDict, initial: Callable[[Tensor], State]
) -> dict[Tensor, State]:
    groups = cast("list[dict[str, list[object]]]", given["param_groups"])
    saved = cast("dict[object, Mapping[str, object]]", given["state"])
    numbers = chain.from_iterable(group["params"] for group in groups)
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    where = f"parameter {{}}, {type(optimizer).__name__}.load_state_dict"
    # Groups that do not match are refused by torch, right after this, with its own message.
    return {
        param: _restored_one(initial(param), saved[number], where.format(number))
        for param, number in zip(params, numbers, strict=False)
        if saved.get(number)
    }


def _restored_one(restored: State, saved: Mapping[str, object], where: str) -> State:
    missing = [name for name in restored if name not in saved]
    if missing:
        raise ValueError(f"state has no {', '.join(missing)}, but should [{where}]")
    # In order: with two faults, the same one is named on every run.
    if "step" in restored:
        restored["step"].fill_(whole_steps(saved["step"], where))
    for name in MOMENTS:
        moment = saved[name]
        if not isinstance(moment, Tensor) or not moment.is_floating_point():
            raise ValueError(f"{name} should be a floating-point tensor, but is not [{where}]")
        check_in_memory(moment, name, where)
        if moment.shape != restored[name].shape:
            raise ValueError(
                f"{name} has shape {tuple(moment.shape)}, but should have "
                f"{tuple(restored[name].shape)} [{where}]"
            )
        restored[name].copy_(moment)
    return restored
