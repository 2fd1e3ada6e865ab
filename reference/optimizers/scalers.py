"""Loss scalers as objects: the scale, the loss multiplied with it, and when the scale moves.

The transitions are those of `reference.loss_scale`. The classes add the state between two
steps, and a dict to save it. A scaler decides nothing about the optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from torch import Tensor, nn

from twinstep.contract.compat import CORRECT, Compat
from twinstep.contract.errors import MinimumLossScale
from twinstep.contract.loss_scale import (
    RULES,
    Saved,
    ScaleArguments,
    check_rule,
    checked_scale,
    checked_state,
)
from twinstep.contract.zero import check_scaler_arguments
from twinstep.reference.arithmetic import fp32
from twinstep.reference.loss_scale import (
    DynamicRule,
    Rule,
    ScaleState,
    StaticRule,
    TorchRule,
    WrapperRule,
)
from twinstep.reference.unscale import any_nonfinite


class LossScale:
    """A scaler; `StaticLossScale` and `DynamicLossScale` are the ones to use.

    Attributes:
        rule: moves the scale.
        state: an immutable record of what the rule remembers.
        dynamic: True if the scale can move.
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
        """The loss in fp32, multiplied by the scale; a new tensor.

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
        """True if a gradient of these parameters, which are read once, is not finite."""
        grads = [param.grad for param in params if param.grad is not None]
        return bool(any_nonfinite(grads).item())

    def state_dict(self) -> Saved:
        """The memory of the rule; constants belong to the constructor."""
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
        scale, counters = checked_state(state_dict, self.rule.remembers, self.dynamic, where)
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
        check_rule(rule, "DynamicLossScale", RULES[1:])
        scale = checked_scale(init_scale, "DynamicLossScale")
        # The scale becomes the floor itself, and is a float always.
        min_scale = float(min_scale)
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
        else:
            self.rule = TorchRule(
                growth_factor=scale_factor,
                backoff_factor=backoff_factor,
                growth_interval=scale_window,
            )


def wrapper_loss_scale(arguments: ScaleArguments) -> LossScale:
    """The scaler that the arguments of an FP16 optimizer stand for."""
    static = arguments.static_scale()
    if static is not None:
        return StaticLossScale(scale=static)
    scale, window, floor = arguments.constants()
    return DynamicLossScale(rule="wrapper", init_scale=scale, scale_window=window, min_scale=floor)


def zero_loss_scale(
    scale: float, dynamic: bool, arguments: Mapping[str, float] | None, compat: Compat
) -> LossScale:
    """The scaler that the arguments of `ZeroOptimizer` stand for.

    Args:
        scale: without `dynamic`.
        dynamic: the scale moves by the rule with hysteresis.
        arguments: of `DynamicLossScale`, or None for its defaults.
        compat: see `DynamicLossScale`.

    Raises:
        ValueError: an argument has another name.
    """
    if not dynamic:
        return StaticLossScale(scale=scale)
    given = dict(arguments or {})
    check_scaler_arguments(given)
    make: Callable[..., LossScale] = DynamicLossScale
    return make(**given, compat=compat)


def saved_scale(scaler: LossScale) -> Saved:
    """The dict of a scaler, with the factor and the window that DeepSpeed reads.

    They are written for DeepSpeed alone: whoever loads the dict here keeps the constants of its own
    constructor. Rules that DeepSpeed does not have get none.
    """
    saved, rule = scaler.state_dict(), scaler.rule
    if isinstance(rule, DynamicRule | WrapperRule):
        saved |= {"scale_factor": rule.scale_factor, "scale_window": rule.scale_window}
    return saved
