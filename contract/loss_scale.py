"""Loss scalers from outside: the arguments of a constructor and a saved state, checked whole."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from twinstep.contract.errors import in_words

LOG = logging.getLogger(__name__)
Saved = dict[str, float | int | bool]
WRAPPER_ARGUMENTS = ("init_scale", "scale_window", "min_scale")
HYSTERESIS = {"delayed_shift": 1, "consecutive_hysteresis": False}  # and the values for none
RULES = ("static", "dynamic", "wrapper", "torch")
# A hysteresis below 1 goes on falling; nothing else does.
LOWEST = {"last_overflow_iter": -1, "cur_hysteresis": -(2**63)}


def check_rule(rule: str, where: str, rules: tuple[str, ...] = RULES) -> None:
    """Require the name of a rule.

    Raises:
        ValueError: there is no such rule.
    """
    if rule not in rules:
        raise ValueError(f"rule={rule!r}, but should be one of {', '.join(rules)} [{where}]")


def checked_scale(scale: object, where: str) -> float:
    """A scale as a float.

    Raises:
        ValueError: it is no number, or not positive and finite.
    """
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise ValueError(f"loss scale is {in_words(scale)}, but should be a number [{where}]")
    # A whole number may be greater than any float.
    if not 0.0 < scale <= sys.float_info.max:
        raise ValueError(
            f"loss scale is {in_words(scale)}, but should be positive and finite [{where}]"
        )
    return float(scale)


def checked_state(
    state_dict: Mapping[str, object], counters: tuple[str, ...], dynamic: bool, where: str
) -> tuple[float, dict[str, int]]:
    """The scale of a saved state, and its counters by name.

    Args:
        state_dict: of a scaler; keys of the constants are ignored.
        counters: that the rule remembers.
        dynamic: of the scaler that loads.
        where: the method, for messages.

    Raises:
        ValueError: the state is that of another rule, a key is missing or a value makes no sense.
    """
    keys = ("dynamic_loss_scale", "cur_scale", *counters)
    missing = [key for key in keys if key not in state_dict]
    if missing:
        raise ValueError(f"state has no {', '.join(missing)}, but should [{where}]")
    saved = state_dict["dynamic_loss_scale"]
    if saved is not dynamic:
        raise ValueError(
            f"dynamic_loss_scale={in_words(saved)}, but should be {dynamic}: the rule comes from "
            f"the constructor [{where}]"
        )
    counts = {name: _checked_counter(name, state_dict[name], where) for name in counters}
    scale = state_dict["cur_scale"]
    # Repeated growth reaches infinity, and torch's rule reaches 0.
    reached = isinstance(scale, float) and scale in (0.0, math.inf)
    return cast(float, scale) if reached else checked_scale(scale, where), counts


def _checked_counter(name: str, value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={in_words(value)}, but should be a whole number [{where}]")
    least = LOWEST.get(name, 0)
    if not least <= value < 2**63:
        raise ValueError(
            f"{name}={in_words(value)}, but should be at least {least} and fit int64 [{where}]"
        )
    return value


def name_idle(
    scales: bool, static: float, dynamic: bool, given: Mapping[str, float] | None
) -> None:
    """Log which arguments of a loss scale change nothing.

    Args:
        scales: False where the loss is never scaled.
        static: `static_loss_scale`.
        dynamic: `dynamic_loss_scale`.
        given: `dynamic_loss_args`.
    """
    if not scales:
        idle = {"static_loss_scale": static != 1.0, "dynamic_loss_scale": dynamic}
        idle["dynamic_loss_args"] = given is not None
        for name in (name for name, is_given in idle.items() if is_given):
            LOG.warning("%s changes nothing: only the loss of fp16 is scaled", name)
        return
    if dynamic and static != 1.0:
        LOG.warning("static_loss_scale=%s changes nothing with dynamic_loss_scale=True", static)
    if not dynamic and given is not None:
        LOG.warning("dynamic_loss_args changes nothing without dynamic_loss_scale=True")


@dataclass(frozen=True, kw_only=True)
class ScaleArguments:
    """The arguments of an FP16 optimizer that choose its loss scale.

    Attributes:
        scales: False for anything but fp16, where the scale is 1 and never moves.
        static_loss_scale: the scale without `dynamic_loss_scale`.
        dynamic_loss_scale: True if it moves.
        dynamic_loss_args: `init_scale`, `scale_window` and `min_scale`; `delayed_shift` and
            `consecutive_hysteresis` are taken and reported, since this rule has no hysteresis.
        initial_scale: without `dynamic_loss_args`.
        min_scale: without `dynamic_loss_args`.
    """

    scales: bool
    static_loss_scale: float
    dynamic_loss_scale: bool
    dynamic_loss_args: Mapping[str, float] | None
    initial_scale: float
    min_scale: float

    def static_scale(self) -> float | None:
        """The scale that never moves; None where it does."""
        dynamic, given = self.dynamic_loss_scale, self.dynamic_loss_args
        name_idle(self.scales, self.static_loss_scale, dynamic, given)
        if not self.scales:
            return 1.0
        return None if self.dynamic_loss_scale else self.static_loss_scale

    def constants(self) -> tuple[float, int, float]:
        """First scale, window and floor of the scale that moves.

        Raises:
            ValueError: `dynamic_loss_args` lacks one of the three, or has other keys.
        """
        given = self.dynamic_loss_args
        if given is None:
            return self.initial_scale, 1000, self.min_scale
        missing = [name for name in WRAPPER_ARGUMENTS if name not in given]
        if missing:
            raise ValueError(
                f"dynamic_loss_args has {', '.join(given)}, but lacks {', '.join(missing)}"
            )
        strangers = [str(name) for name in given if name not in (*WRAPPER_ARGUMENTS, *HYSTERESIS)]
        if strangers:
            raise ValueError(
                f"dynamic_loss_args has {', '.join(strangers)}, but should have "
                f"{', '.join(WRAPPER_ARGUMENTS)}"
            )
        idle = [
            f"{name}={given[name]}"
            for name, none in HYSTERESIS.items()
            if given.get(name, none) != none
        ]
        if idle:
            LOG.warning(
                "dynamic_loss_args has %s, which changes nothing: this rule has no hysteresis, "
                "loss_scale_config=DynamicLossScale(...) has",
                ", ".join(idle),
            )
        return given["init_scale"], int(given["scale_window"]), given["min_scale"]
