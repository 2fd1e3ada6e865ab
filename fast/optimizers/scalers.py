"""Loss scalers: what the scale is, the loss multiplied with it, and when the scale moves.

The state of a scaler lives in a control block on one device, where the kernels of
`fast.kernels.loss_scale` and of whole steps move it: that of the optimizer which holds the scaler,
or of the first loss or gradient that it is given. Reading it waits for that device.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
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
from twinstep.contract.shards import waited
from twinstep.contract.zero import check_scaler_arguments
from twinstep.fast.kernels import loss_scale as rules
from twinstep.fast.kernels.reduce import global_norm_
from twinstep.fast.optimizers.agreement import raise_told
from twinstep.fast.runtime.control import ControlBlock
from twinstep.fast.runtime.dispatch import device_of_kernels

COUNTERS = {
    "static": ("cur_iter",),
    "dynamic": ("cur_iter", "last_overflow_iter", "cur_hysteresis"),
    "wrapper": ("cur_iter", "last_overflow_iter"),
    "torch": ("growth_tracker",),
}
SHARED = ("scale", "cur_iter", "last_overflow_iter", "found_inf")
WINDOW = ("scale_factor", "scale_window")


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """A rule of the loss scale and its constants, named as in `fast.kernels.mixed_step`."""

    rule: str = "dynamic"
    init_scale: float = 65536.0
    scale_factor: float = 2.0
    scale_window: int = 1000
    min_scale: float = 1.0
    delayed_shift: int = 2
    backoff_factor: float = 0.5
    consecutive_hysteresis: bool = False
    raise_error_at_min_scale: bool = True

    def __post_init__(self) -> None:
        check_rule(self.rule, "LossScaling")
        if self.scale_window < 1:
            raise ValueError(
                f"scale_window={self.scale_window}, but should be at least 1 [LossScaling]"
            )

    def controls(self) -> dict[str, float]:
        """Return constants and first state by the names of controls."""
        return {
            "scale": self.init_scale,
            "scale_factor": self.scale_factor,
            "scale_window": self.scale_window,
            "min_scale": self.min_scale,
            "delayed_shift": self.delayed_shift,
            "backoff_factor": self.backoff_factor,
            "cur_hysteresis": self.delayed_shift,
            "last_overflow_iter": -1,
        }


class LossScale:
    """Base of all scalers; `StaticLossScale` and `DynamicLossScale` are the ones to use.

    Attributes:
        scaling: the rule that kernels run, with its constants.
        dynamic: whether the scale can move.
        compat: `growth_counts_this_step` is honoured.
    """

    dynamic: bool

    def __init__(self, scaling: LossScaling, name: str, compat: Compat) -> None:
        self.scaling, self.compat = scaling, compat
        self._counters = COUNTERS[name]
        self._block = ControlBlock(torch.device("cpu"), scaling.controls())
        self._placed = False

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        name = next(name for name, kept in COUNTERS.items() if kept is self._counters)
        return _copied, (type(self), self.scaling, name, self.compat, self.state_dict())

    def on(self, device: torch.device) -> ControlBlock:
        """The control block, moved to a device if it is not there; it stays there from now on.

        Args:
            device: "cuda" is the current one.
        """
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._placed = True
        if self._block.block.device != device:
            state = self.state_dict()
            self._block = ControlBlock(device, self.scaling.controls())
            self.enter(self.restored(state))
        return self._block

    def _near(self, device: torch.device) -> ControlBlock:
        """The control block; the first call decides on its device."""
        return self._block if self._placed else self.on(device)

    @property
    def loss_scale(self) -> float:
        """The current scale. Assigning sets it and leaves the counters."""
        return float(self._block["scale"].item())

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self._block["scale"].fill_(checked_scale(scale, type(self).__name__))

    def update_scale(self, overflow: bool) -> None:
        """Enter the state after a step that overflowed or did not.

        Raises:
            MinimumLossScale: overflow at the floor of a rule that makes this an error; nothing
                has changed.
            RuntimeError: the dynamic rule with `growth_counts_this_step`, which whole steps know.
        """
        block = self._near(device_of_kernels())
        if self.compat.growth_counts_this_step and self.scaling.rule == "dynamic":
            raise RuntimeError(
                "compat has growth_counts_this_step, but should not for a scaler that is stepped "
                f"alone: the kernel of a whole step has it [{type(self).__name__}.update_scale]"
            )
        block["found_inf"].fill_(float(overflow))
        scaling, names = self.scaling, (*SHARED, *WINDOW, "min_scale")
        if scaling.rule == "wrapper":
            rules.update_scale_wrapper_(**{name: block[name] for name in names})
        elif scaling.rule == "torch":
            rules.update_scale_torch_(
                **{name: block[name] for name in ("scale", "growth_tracker", "found_inf")},
                growth_factor=block["scale_factor"],
                backoff_factor=block["backoff_factor"],
                growth_interval=block["scale_window"],
            )
        else:
            rules.update_scale_dynamic_(
                **{name: block[name] for name in names},
                **{n: block[n] for n in ("cur_hysteresis", "exhausted", "delayed_shift")},
                consecutive_hysteresis=scaling.consecutive_hysteresis,
                raise_error_at_min_scale=scaling.raise_error_at_min_scale,
            )
            self.raise_if_exhausted()

    def raise_if_exhausted(self) -> None:
        """Raise once for what has stopped the steps since the last call; waits for the device.

        Raises:
            MinimumLossScale: an overflow met the floor.
            ValueError: another rank has refused a step, or has another scale.
        """
        if raise_told(self._block["exhausted"]):
            raise MinimumLossScale(
                f"gradients overflow at loss scale {self.loss_scale}, which should be above its "
                f"floor min_scale={self.scaling.min_scale} to shrink again "
                f"[step {self._block['cur_iter'].item()}]"
            )

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss in fp32, multiplied by the scale; a new tensor. It waits for no device."""
        # Rounded first: a float64 factor would make a float64 loss of a 0-dim one.
        return loss.float() * self._near(loss.device)["scale"].to(
            device=loss.device, dtype=torch.float32
        )

    def backward(
        self, loss: Tensor, create_graph: bool = False, retain_graph: bool = False
    ) -> None:
        """Run backward from the scaled loss."""
        torch.autograd.backward(
            self.scale_loss(loss), create_graph=create_graph, retain_graph=retain_graph
        )

    def scale_gradient(
        self,
        module: nn.Module,
        grad_in: tuple[Tensor | None, ...],
        grad_out: tuple[Tensor | None, ...],
    ) -> tuple[Tensor | None, ...]:
        """A backward hook of a module: multiply what flows in; None stays None."""
        scale = self.loss_scale
        return tuple(grad if grad is None else grad * scale for grad in grad_in)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """True if a gradient of these parameters, which are read once, is not finite."""
        grads = [waited(p.grad).contiguous() for p in params if p.grad is not None]
        if not grads:
            return False
        self._near(grads[0].device)
        norm, found = torch.zeros(2, dtype=torch.float32, device=grads[0].device)
        global_norm_(grads, norm=norm, found_inf=found)
        return bool(found.item())

    def state_dict(self) -> Saved:
        """The memory of the rule; constants belong to the constructor."""
        kept = {name: int(self._block[name].item()) for name in self._counters}
        return {"dynamic_loss_scale": self.dynamic, "cur_scale": self.loss_scale, **kept}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Take over a saved state; keys of the constants are ignored.

        Raises:
            ValueError: the state is that of another rule, a key is missing or a value makes no
                sense. Nothing has changed.
        """
        self.enter(self.restored(state_dict))

    def restored(self, state_dict: Mapping[str, object]) -> dict[str, float]:
        """The controls that a saved state stands for; raises as `load_state_dict` does."""
        where = f"{type(self).__name__}.load_state_dict"
        scale, counts = checked_state(state_dict, self._counters, self.dynamic, where)
        return {"scale": scale, **counts}

    def enter(self, controls: Mapping[str, float]) -> None:
        """Enter a state that `restored` returned."""
        for name, value in controls.items():
            self._block[name].fill_(value)


def _copied(
    kind: type[LossScale], scaling: LossScaling, name: str, compat: Compat, state: Saved
) -> LossScale:
    """A scaler from its parts; the first call decides on its device."""
    made = object.__new__(kind)
    LossScale.__init__(made, scaling, name, compat)
    made.load_state_dict(state)
    return made


class StaticLossScale(LossScale):
    """A scale that never moves.

    Args:
        scale: positive and finite.
    """

    dynamic = False

    def __init__(self, *, scale: float = 1.0) -> None:
        # A wrapper rule that multiplies and divides by 1 counts steps and moves nothing.
        checked = checked_scale(scale, "StaticLossScale")
        still = LossScaling(rule="wrapper", init_scale=checked, scale_factor=1.0, min_scale=0.0)
        super().__init__(still, "static", CORRECT)


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
        compat: `growth_counts_this_step` is honoured in whole steps; `update_scale` refuses it.
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
        scaling = LossScaling(
            rule=rule,
            init_scale=checked_scale(init_scale, "DynamicLossScale"),
            scale_factor=scale_factor,
            scale_window=scale_window,
            min_scale=min_scale,
            delayed_shift=delayed_shift,
            backoff_factor=backoff_factor,
            consecutive_hysteresis=consecutive_hysteresis,
            raise_error_at_min_scale=raise_error_at_min_scale and rule == "dynamic",
        )
        super().__init__(scaling, rule, compat)


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
    """Return the dict of a scaler, and the two constants that DeepSpeed reads with it.

    They are written for DeepSpeed alone: loading here keeps those of the constructor.
    """
    known = isinstance(scaler, DynamicLossScale) and scaler.scaling.rule != "torch"
    window = int(scaler.scaling.scale_window)
    constants: Saved = {"scale_factor": scaler.scaling.scale_factor, "scale_window": window}
    return {**scaler.state_dict(), **(constants if known else {})}


def wrapper_loss_scale(arguments: ScaleArguments) -> LossScale:
    """The scaler that the arguments of an FP16 optimizer stand for."""
    static = arguments.static_scale()
    if static is not None:
        return StaticLossScale(scale=static)
    scale, window, floor = arguments.constants()
    return DynamicLossScale(rule="wrapper", init_scale=scale, scale_window=window, min_scale=floor)
