"""Loss scalers as objects: the scale, the loss multiplied with it, and when the scale moves.

The transitions are those of `reference.loss_scale`. What the classes add is the state between two
steps, and a dict to save it. A scaler decides nothing about the optimizer step.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import cast

from torch import Tensor, nn

from twinstep.reference.arithmetic import fp32
from twinstep.reference.compat import CORRECT, Compat, growth_test
from twinstep.reference.errors import shown
from twinstep.reference.loss_scale import (
    DynamicRule,
    DynamicState,
    TorchRule,
    TorchState,
    WrapperRule,
    WrapperState,
    update_dynamic,
    update_torch,
    update_wrapper,
)
from twinstep.reference.overflow import any_nonfinite
from twinstep.reference.scale_state import RULES

Saved = dict[str, float | int | bool]


@dataclass(frozen=True, kw_only=True)
class StaticState:
    """What a static scale remembers: itself, and how many steps it has seen."""

    scale: float
    cur_iter: int = 0


State = StaticState | DynamicState | WrapperState | TorchState


class LossScale:
    """What all scalers share; `StaticLossScale` and `DynamicLossScale` are the ones to use.

    Attributes:
        state: an immutable record of what the rule remembers.
        dynamic: whether the scale can move.
    """

    state: State
    dynamic: bool

    @property
    def loss_scale(self) -> float:
        """The current scale. Assigning sets it and leaves the counters."""
        return self.state.scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.state = replace(self.state, scale=checked_scale(scale, type(self).__name__))

    def after(self, found_inf: bool) -> State:
        """The state after a step, without entering it.

        Raises:
            MinimumLossScale: see `reference.loss_scale.update_dynamic`.
        """
        if not isinstance(self.state, StaticState):
            raise TypeError(f"state is {self.state}, but should be that of a static scale")
        return replace(self.state, cur_iter=self.state.cur_iter + 1)

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
        kept = {field.name: getattr(self.state, field.name) for field in fields(self.state)}
        scale = kept.pop("scale")
        return {"dynamic_loss_scale": self.dynamic, "cur_scale": scale, **kept}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Take over a saved state; keys of the constants are ignored.

        Raises:
            ValueError: the state is that of another rule, a key is missing or a value makes no
                sense. Nothing has changed.
        """
        self.state = self.restored(state_dict)

    def restored(self, state_dict: Mapping[str, object]) -> State:
        """The state that a dict holds, without entering it; raises as `load_state_dict` does."""
        where = f"{type(self).__name__}.load_state_dict"
        names = {field.name: field.name for field in fields(self.state)} | {"scale": "cur_scale"}
        missing = [key for key in ("dynamic_loss_scale", *names.values()) if key not in state_dict]
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
        changed: dict[str, float | int] = {
            name: _checked_counter(name, state_dict[key], where)
            for name, key in names.items()
            if name != "scale"
        }
        changed["scale"] = _reached_scale(state_dict["cur_scale"], where)
        restored: Callable[..., State] = replace
        return restored(self.state, **changed)


class StaticLossScale(LossScale):
    """A scale that never moves.

    Args:
        scale: positive and finite.
    """

    dynamic = False

    def __init__(self, *, scale: float = 1.0) -> None:
        self.state: State = StaticState(scale=checked_scale(scale, "StaticLossScale"))


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
        self.rule: DynamicRule | WrapperRule | TorchRule
        if rule == "dynamic":
            self.rule = DynamicRule(
                scale_factor=scale_factor,
                scale_window=scale_window,
                min_scale=min_scale,
                delayed_shift=delayed_shift,
                consecutive_hysteresis=consecutive_hysteresis,
                raise_error_at_min_scale=raise_error_at_min_scale,
                growth_test=growth_test(compat),
            )
            self.state = DynamicState(scale=scale, cur_hysteresis=delayed_shift)
        elif rule == "wrapper":
            self.rule = WrapperRule(
                scale_factor=scale_factor, scale_window=scale_window, min_scale=min_scale
            )
            self.state = WrapperState(scale=scale)
        elif rule == "torch":
            self.rule = TorchRule(
                growth_factor=scale_factor,
                backoff_factor=backoff_factor,
                growth_interval=scale_window,
            )
            self.state = TorchState(scale=scale)
        else:
            names = ", ".join(RULES[1:])
            raise ValueError(f"rule={rule!r}, but should be one of {names} [DynamicLossScale]")

    def after(self, found_inf: bool) -> State:
        """The state after a step, without entering it.

        Raises:
            MinimumLossScale: see `reference.loss_scale.update_dynamic`.
        """
        if isinstance(self.rule, DynamicRule):
            return update_dynamic(cast(DynamicState, self.state), found_inf, self.rule)
        if isinstance(self.rule, WrapperRule):
            return update_wrapper(cast(WrapperState, self.state), found_inf, self.rule)
        return update_torch(cast(TorchState, self.state), found_inf, self.rule)


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
