"""State dicts of the FP16 optimizers, with the keys that DeepSpeed's have.

dynamic_loss_scale, cur_scale, ...    what the loss scale remembers
clip_grad                             largest norm
optimizer_state_dict                  dict of the inner optimizer
fp32_groups_flat                      masters of `FP16Optimizer`, one per group
fp32_groups                           masters of `FP16UnfusedOptimizer`, a list per group
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TypeVar, cast

import torch
from torch import Tensor

from twinstep.contract.agreement import device_of, on_all_ranks
from twinstep.contract.checkpoint.entries import (
    FLAT,
    SAME,
    UNFUSED,
    Loaded,
    clip_norm,
    copied,
    copy_of,
    matching_tensors,
    require_keys,
)
from twinstep.contract.checkpoint.inner import counts_for_groups, inner_state, own_counters
from twinstep.contract.loss_scale import Saved
from twinstep.contract.moments import StateDict
from twinstep.contract.parallel import Groups

INNER = "optimizer_state_dict"
Scale = TypeVar("Scale")
Masters = Sequence[Tensor] | Sequence[Sequence[Tensor]]


def saved(
    optimizer: torch.optim.Optimizer,
    masters: Masters,
    clip_grad: float,
    scale: Saved,
    *,
    cpu_offload: bool,
) -> StateDict:
    """A state dict of copies, not views.

    Args:
        optimizer: the inner one.
        masters: flat ones, or lists of those of each parameter.
        clip_grad: largest norm.
        scale: the dict of the scaler; empty where the optimizer does not scale its loss.
        cpu_offload: copy to the CPU.
    """
    inner = copied(optimizer.state_dict(), cpu_offload)
    if counts_for_groups(optimizer):
        # Every master has a gradient in each step, so that what is shared is what each has counted.
        groups = [group["params"] for group in inner["param_groups"]]
        inner["state"] = own_counters(groups, inner["state"])
    return {
        **scale,
        "clip_grad": clip_grad,
        INNER: inner,
        FLAT if _are_flat(masters) else UNFUSED: _copies(masters, cpu_offload),
    }


def _are_flat(masters: Masters) -> bool:
    return all(isinstance(one, Tensor) for one in masters)


def _copies(masters: Masters, cpu_offload: bool) -> list[object]:
    return [
        copy_of(one, cpu_offload) if isinstance(one, Tensor) else _copies(one, cpu_offload)
        for one in masters
    ]


def checked(
    optimizer: torch.optim.Optimizer,
    state_dict: object,
    masters: Masters,
    where: str,
    ranks: Groups,
    *,
    restored: Callable[[Mapping[str, object]], Scale] | None,
    states: bool,
) -> tuple[Loaded, Scale | None]:
    """Contents of a state dict that a wrapper takes, and the state of its loss scale.

    Args:
        optimizer: the inner one; not changed.
        state_dict: of this class on either side, or of DeepSpeed's.
        masters: as they are now.
        where: the method, for messages.
        ranks: groups of all ranks that load.
        restored: checks and returns the state of the loss scale; None if the loss has none.
        states: the state of the inner optimizer is asked for, too.

    Raises:
        ValueError: something does not fit, here or on another rank, or ranks would load states of
            different steps, clip norms or scales.
    """

    def read() -> tuple[Loaded, Scale | None]:
        loaded = _checked(optimizer, state_dict, masters, where, states)
        given = cast("Mapping[str, object]", state_dict)
        return loaded, None if restored is None else restored(given)

    def scale(_: object) -> float | None:
        return None if restored is None else float(cast("Saved", state_dict)["cur_scale"])

    same = {name: partial(_of_loaded, number) for name, number in SAME.items()}
    return on_all_ranks(read, ranks, device_of(optimizer), same={**same, "loss scale": scale})


def _of_loaded(
    number: Callable[[Loaded], float | None], found: tuple[Loaded, object]
) -> float | None:
    return number(found[0])


def _checked(
    optimizer: torch.optim.Optimizer,
    state_dict: object,
    masters: Masters,
    where: str,
    states: bool,
) -> Loaded:
    """The same on this rank, without the loss scale."""
    key = FLAT if _are_flat(masters) else UNFUSED
    given = require_keys(state_dict, (INNER, key), where)
    return Loaded(
        clip_grad=clip_norm(given, where),
        masters=_matching(given[key], masters, key, where),
        inner=inner_state(optimizer, given[INNER], where) if states else None,
    )


def _matching(found: object, masters: Masters, key: str, where: str) -> list[Tensor]:
    """Saved masters in one list."""
    if key == FLAT:
        return matching_tensors(found, [m for m in masters if isinstance(m, Tensor)], key, where)
    if not isinstance(found, list | tuple):
        raise ValueError(f"{key} is a {type(found).__name__}, but should be a list [{where}]")
    if len(found) != len(masters):
        raise ValueError(f"{key} has {len(found)} groups, but should have {len(masters)} [{where}]")
    rows = [
        matching_tensors(group, list(own), f"{key}[{index}]", where)
        for index, (group, own) in enumerate(zip(found, masters, strict=True))
    ]
    return list(chain.from_iterable(rows))
