"""Loss scalers as objects: the scale, the loss multiplied with it, and when the scale moves.

The transitions are those of `reference.loss_scale`. What the classes add is the state between two
steps, and a dict to save it. A scaler decides nothing about the optimizer step.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import cast

from torch import Tensor, nn

from twinstep.reference.arithmetic import fp32
from twinstep.reference.compat import CORRECT, Compat
from twinstep.reference.errors import MinimumLossScale, shown
from twinstep.reference.loss_scale import (
    DynamicRule,
    Rule,
    ScaleState,
    StaticRule,
    TorchRule,
    WrapperRule,
)
from twinstep.reference.overflow import any_nonfinite

Saved = dict[str, float | int | bool]


class LossScale:
    """What all scalers share; `StaticLossScale` and `DynamicLossScale` are the ones to use.

    Attributes:
        rule: moves the scale.
        state: an immutable record of what the rule remembers.
        dynamic: whether the scale can move.
    """

    rule: Rule
    state: ScaleState
    dynamic: bool

    @property
    def loss_scale(self) -> float:
        """The current scale. Assigning sets it and leaves the counters."""
        return self.state.scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.state = replace(self.state, scale=checked_scale(scale, type(self).__name__))

    def after(self, found_inf: bool) -> ScaleState:
        """The state after a step, without entering it.

        Raises:
            MinimumLossScale: an overflow at the floor of a rule that makes this an error. No state
                changes, so calling again raises again.
        """
        after = self.rule.after(self.state, found_inf)
        if after.exhausted:
            scale = self.state.scale
            raise MinimumLossScale(
                f"gradients overflow at loss scale {scale}, which should be above its floor "
                f"min_scale={scale} to shrink again [step {self.state.cur_iter}]"
            )
        return after

    def update_scale(self, overflow: bool) -> None:
        """Enter the state after a step that overflowed or did not.

        Raises:
            MinimumLossScale: as `after`; no state has changed.
        """
        self.state = self.after(overflow)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss in fp32, multiplied by the scale.

        A scale of 65536 is no fp16 number: multiplied in fp16, every loss would overflow.
        """
        return fp32(loss) * self.loss_scale

    def backward(
        self, loss: Tensor, create_graph: bool = False, retain_graph: bool = False
    ) -> None:
        """Run backward from the scaled loss."""
        scaled = self.scale_loss(loss)
        scaled.backward(  # type: ignore[no-untyped-call]
            create_graph=create_graph, retain_graph=retain_graph
        )

    def scale_gradient(
        self,
        module: nn.Module,
        grad_in: tuple[Tensor | None, ...],
        grad_out: tuple[Tensor | None, ...],
    ) -> tuple[Tensor | None, ...]:
        """A backward hook of a module: multiply what flows in; None stays None."""
        del module, grad_out
        return tuple(None if grad is None else self.loss_scale * grad for grad in grad_in)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether any gradient of these parameters holds an infinity or a NaN."""
        grads = [param.grad for param in params if param.grad is not None]
        return bool(any_nonfinite(grads).item())

    def state_dict(self) -> Saved:
        """What the rule remembers; constants belong to the constructor."""
        kept = {name: getattr(self.state, name) for name in self.rule.remembers}
        return {"dynamic_loss_scale": self.dynamic, "cur_scale": self.state.scale, **kept}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Take over a saved state; keys of the constants are ignored.

        Raises:
            ValueError: the state is that of another rule, a key is missing or a value makes no
                sense. Nothing has changed.
        """
        self.state = self.restored(state_dict)

    def restored(self, state_dict: Mapping[str, object]) -> ScaleState:
        """The state that a dict holds, without entering it; raises as `load_state_dict` does."""
        where = f"{type(self).__name__}.load_state_dict"
        keys = ("dynamic_loss_scale", "cur_scale", *self.rule.remembers)
        missing = [key for key in keys if key not in state_dict]
        if missing:
            raise ValueError(f"state lacks {', '.join(missing)} [{where}]")
        if not isinstance(state_dict["dynamic_loss_scale"], bool):
            found = state_dict["dynamic_loss_scale"]
            raise ValueError(
                f"dynamic_loss_scale={shown(found)}, but should be True or False [{where}]"
            )
        if state_dict["dynamic_loss_scale"] is not self.dynamic:
            kind = {True: "dynamic", False: "static"}
            raise ValueError(
                f"state is of a {kind[not self.dynamic]} loss scale, but this one is "
                f"{kind[self.dynamic]}: the rule comes from the constructor [{where}]"
            )
        counters = {
            name: _checked_counter(name, state_dict[name], where) for name in self.rule.remembers
        }
        scale = _reached_scale(state_dict["cur_scale"], where)
        restored: Callable[..., ScaleState] = replace
        return restored(self.state, scale=scale, **counters)


class StaticLossScale(LossScale):
    """A scale that never moves.

    Args:
        scale: positive and finite.
    """

    dynamic = False

    def __init__(self, *, scale: float = 1.0) -> None:
        self.rule = StaticRule()
        self.state = ScaleState(scale=checked_scale(scale, "StaticLossScale"))


class DynamicLossScale(LossScale):
    """A scale that shrinks after overflows and grows after clean steps.

    Args:
        rule: "dynamic" (hysteresis and a floor), "wrapper" (the smaller rule of the FP16
            optimizers) or "torch" (`torch.amp.GradScaler`).
        init_scale: the first scale, positive and finite.
        scale_factor: what the scale is multiplied by, and divided by except with "torch".
        scale_window: clean steps between two growths.
        min_scale: the floor; "torch" has none.
        delayed_shift: hysteresis; "dynamic" only.
        consecutive_hysteresis: every clean step refills the hysteresis; "dynamic" only.
        raise_error_at_min_scale: an overflow at the floor is an error; "dynamic" only.
        backoff_factor: what an overflow multiplies the scale by; "torch" only.
        compat: `growth_counts_this_step` is honoured here.
    """

    dynamic = True

    def __init__(
        self,
        *,
        rule: str = "dynamic",
        init_scale: float = 65536.0,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_scale: float = 1.0,
        delayed_shift: int = 2,
        consecutive_hysteresis: bool = False,
        raise_error_at_min_scale: bool = True,
        backoff_factor: float = 0.5,
        compat: Compat = CORRECT,
    ) -> None:
        scale = checked_scale(init_scale, "DynamicLossScale")
        self.state = ScaleState(scale=scale, cur_hysteresis=delayed_shift)
        if rule == "dynamic":
            self.rule = DynamicRule(
                scale_factor=scale_factor,
                scale_window=scale_window,
                min_scale=min_scale,
                delayed_shift=delayed_shift,
                consecutive_hysteresis=consecutive_hysteresis,
                raise_error_at_min_scale=raise_error_at_min_scale,
                growth_counts_this_step=compat.growth_counts_this_step,
            )
        elif rule == "wrapper":
            self.rule = WrapperRule(
                scale_factor=scale_factor, scale_window=scale_window, min_scale=min_scale
            )
        elif rule == "torch":
            self.rule = TorchRule(
                growth_factor=scale_factor,
                backoff_factor=backoff_factor,
                growth_interval=scale_window,
            )
        else:
            raise ValueError(
                f"rule={rule!r}, but should be one of dynamic, wrapper, torch [DynamicLossScale]"
            )


def wrapper_loss_scale(
    *,
    scales: bool,
    static_loss_scale: float,
    dynamic_loss_scale: bool,
    dynamic_loss_args: Mapping[str, float] | None,
    initial_scale: float,
    min_scale: float,
) -> LossScale:
    """The scaler that the arguments of an FP16 optimizer stand for.

    Args:
        scales: False for anything but fp16, where the scale is 1 and never moves.
        static_loss_scale: the scale without `dynamic_loss_scale`.
        dynamic_loss_scale: whether it moves.
        dynamic_loss_args: `init_scale`, `scale_window` and `min_scale`; hysteresis keys are
            accepted, this rule has none.
        initial_scale: without `dynamic_loss_args`.
        min_scale: without `dynamic_loss_args`.

    Raises:
        ValueError: `dynamic_loss_args` lacks one of the three.
    """
    if not scales:
        return StaticLossScale(scale=1.0)
    if not dynamic_loss_scale:
        return StaticLossScale(scale=static_loss_scale)
    if dynamic_loss_args is None:
        return DynamicLossScale(rule="wrapper", init_scale=initial_scale, min_scale=min_scale)
    needed = ("init_scale", "scale_window", "min_scale")
    missing = [key for key in needed if key not in dynamic_loss_args]
    if missing:
        raise ValueError(
            f"dynamic_loss_args has {', '.join(dynamic_loss_args)}, but lacks {', '.join(missing)}"
        )
    return DynamicLossScale(
        rule="wrapper",
        init_scale=dynamic_loss_args["init_scale"],
        scale_window=int(dynamic_loss_args["scale_window"]),
        min_scale=dynamic_loss_args["min_scale"],
    )


def checked_scale(scale: float, where: str) -> float:
    """A scale as a float.

    Raises:
        ValueError: it is not positive and finite.
    """
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        kind = type(scale).__name__
        raise ValueError(f"loss scale is a {kind}, but should be a number [{where}]")
    # A whole number may be greater than any float.
    if not 0.0 < scale <= sys.float_info.max:
        raise ValueError(
            f"loss scale is {shown(scale)}, but should be positive and finite [{where}]"
        )
    return float(scale)


def _reached_scale(scale: object, where: str) -> float:
    """A saved scale: repeated growth reaches infinity, and torch's rule reaches 0."""
    reached = isinstance(scale, float) and scale in (0.0, math.inf)
    return cast(float, scale) if reached else checked_scale(cast(float, scale), where)


def _checked_counter(name: str, value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={shown(value)}, but should be a whole number [{where}]")
    # A hysteresis below 1 goes on falling; nothing else does.
    least = {"last_overflow_iter": -1, "cur_hysteresis": -(2**63)}.get(name, 0)
    if not least <= value < 2**63:
        raise ValueError(
            f"{name}={shown(value)}, but should be at least {least} and fit int64 [{where}]"
        )
    return value
