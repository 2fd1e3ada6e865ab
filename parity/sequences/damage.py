"""State dicts that are malformed, partial, or of a run that has gone on for long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from twinstep.parity.sequences.fills import NAN, Dice

HOW = ("drop", "none", "text", "negative", "nan", "longer", "integer", "extra", "single")
NUMBERS = ("lr", "cur_scale", "clip_grad")
# An int that no float holds.
TOO_LONG = 10**400
# Entry of a dict or list: what holds it, and its key.
Place = tuple[Any, Any]
State = dict[str, object]


def damaged(state: State, seed: int, how: str) -> State:
    """A state dict, changed in place: one entry of it is gone or makes no sense.

    Learning rates, scales, clip norms and tensors of reals become others, which a load that is
    refused must not leave behind. Else hyper-parameters stay as they are: torch loads any.

    Args:
        state: freshly loaded, so that it may be written.
        seed: chooses the entry.
        how: one of HOW.
    """
    _change_values(state)
    places = list(_places(state))
    if not places:
        return state
    holder, key = Dice(seed).pick(places)
    if how == "drop":
        del holder[key]
    elif how == "extra":
        (holder if isinstance(holder, dict) else state)["stranger"] = 1
    else:
        holder[key] = _wrong(holder[key], how)
    return state


def _change_values(value: Any) -> None:
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        if isinstance(item, dict | list):
            _change_values(item)
        elif isinstance(item, Tensor) and item.is_floating_point() and item.dim():
            # One of no dimension may be a counter, which is whole.
            item.mul_(0.5)
        elif isinstance(item, float) and key in NUMBERS:
            value[key] = item + 0.125


def _places(value: Any, group: bool = False) -> Iterator[Place]:
    rows = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(rows):
        if group and key != "params":
            continue
        yield value, key
        if isinstance(item, dict | list):
            yield from _places(item, group=isinstance(key, int) and "params" in item)


def _wrong(value: object, how: str) -> object:
    if how == "none":
        return None
    if how == "text":
        return "strange"
    if how == "single":
        # What can be broadcast is still of another shape.
        return value.reshape(-1)[:1] if isinstance(value, Tensor) else [value]
    if not isinstance(value, Tensor):
        return {"nan": NAN, "longer": TOO_LONG, "integer": False}.get(how, -5)
    if how == "negative":
        return -value - 1
    if how == "nan":
        return torch.full_like(value, NAN) if value.is_floating_point() else NAN
    if how == "longer":
        return torch.cat([value.reshape(-1), value.reshape(-1), torch.zeros(1, dtype=value.dtype)])
    return value.to(torch.int32)


def inside_of(state: State, inside: str = "of another") -> State:
    """A state dict, changed in place, whose inner optimizer had a state of another kind.

    Args:
        state: freshly loaded.
        inside: "as saved", "of another" class, or "none".
    """
    for key in ("optimizer_state_dict", "base_optimizer_state"):
        inner = state.get(key)
        if isinstance(inner, dict) and inside != "as saved":
            states = {number: {"momentum_buffer": torch.ones(1)} for number in inner["state"]}
            state[key] = {**inner, "state": states} if inside == "of another" else None
    return state


def aged(state: State, count: int, since: int) -> State:
    """A state dict whose counters stand at a number, changed in place.

    Args:
        state: freshly loaded.
        count: of steps; at least those since the last overflow.
        since: clean steps since the last overflow, where these are counted.
    """
    count = max(count, since - 1)
    for key, value in state.items():
        rows = value if isinstance(value, list) else [value]
        for row in rows:
            if isinstance(row, dict):
                aged(row, count, since)
        numbers = {
            "step": count,
            "cur_iter": count,
            "last_overflow_iter": count - since,
            "growth_tracker": since,
        }
        if key in numbers:
            number = numbers[key]
            state[key] = torch.full_like(value, number) if isinstance(value, Tensor) else number
    return state
