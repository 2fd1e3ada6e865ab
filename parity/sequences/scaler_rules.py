"""Actions on a loss scale with the interface of `DynamicLossScale`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from twinstep.parity.sequences.actions import Rules, action
from twinstep.parity.sequences.fills import REGIMES, Dice, filled
from twinstep.parity.sequences.rules import SEEDS, parameters
from twinstep.parity.sequences.world import Act, Value, World

SCALE_RULES = ("dynamic", "wrapper", "torch")
Gradients = tuple[Tensor | None, ...]


class _Scaler(Protocol):
    loss_scale: float

    def update_scale(self, overflow: bool) -> None:
        """Enter the state after a step."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The scaled loss."""

    def backward(self, loss: Tensor, create_graph: bool, retain_graph: bool) -> None:
        """Run backward from it."""

    def scale_gradient(self, module: nn.Module, into: Gradients, out: Gradients) -> Gradients:
        """A backward hook."""

    def has_overflow(self, params: list[nn.Parameter]) -> bool:
        """True if a gradient is not finite."""

    def state_dict(self) -> dict[str, object]:
        """The state of the rule."""

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Take a state over."""

    def restored(self, state_dict: Mapping[str, object]) -> object:
        """Check a state."""


def _of(world: World) -> _Scaler:
    return cast(_Scaler, world.optimizer)


class ScalerRules(Rules):
    """Overflows and clean steps, assigned scales, states that fit and that do not.

    What a scaler remembers is read after every action and compared.
    """

    exempt = {"after": "the rule as a pure function, which is a kernel on the other side"}

    @action(
        seed=SEEDS,
        rule=SCALE_RULES,
        consecutive=(False, False, True),
        raises=(False, False, True),
    )
    def build(self, cls: Callable[..., object], dtype: str, device: str, **values: Value) -> World:
        """A scaler whose windows are short, and a few parameters."""
        seed = int(values["seed"])
        dice = Dice(seed)
        options: dict[str, object] = {"scale": dice.pick((8.0, 2.0**16, 3.7))}
        if getattr(cls, "dynamic"):  # noqa: B009
            options = {
                "rule": values["rule"],
                "init_scale": options["scale"],
                "scale_factor": dice.pick((2.0, 1.7, 1e30)),
                "scale_window": dice.pick((1, 2, 3)),
                "min_scale": dice.pick((1.0, 3.0, 0.01)),
                "delayed_shift": dice.pick((2, 1, 3)),
                "backoff_factor": dice.pick((0.5, 0.3)),
                "consecutive_hysteresis": values["consecutive"],
                "raise_error_at_min_scale": values["raises"],
            }
        scaler = cls(**options)
        if hasattr(scaler, "on"):
            scaler.on(torch.device(device))
        return World(
            cls=cls,
            options=options,
            params=parameters(dice, dtype, device, seed, together=False),
            optimizer=scaler,
            device=torch.device(device),
        )

    def apply(self, world: World, act: Act) -> object:
        """Carry out an action, and read what the rule remembers."""
        try:
            return super().apply(world, act)
        finally:
            world.more["readings"] = _of(world).state_dict()

    @action(often=9, drives=("update_scale",), overflow=(False, False, True))
    def update(self, world: World, overflow: bool) -> None:
        """A step that overflowed or did not."""
        _of(world).update_scale(overflow)

    @action(often=2, drives=("backward", "scale_loss"), seed=SEEDS)
    def backward(self, world: World, seed: int) -> object:
        """Gradients of a scaled loss; the scaled loss is compared, too."""
        loss = torch.zeros((), device=world.device)
        for index, param in enumerate(world.params):
            weight = filled(tuple(param.shape), param.dtype, "ordinary", seed + index)
            loss = loss + (param * weight.to(world.device)).float().sum()
        with warnings.catch_warnings():
            # torch remarks on gradients that are laid out otherwise than their parameter.
            warnings.simplefilter("ignore", UserWarning)
            _of(world).backward(loss, False, True)
        return _of(world).scale_loss(loss.detach())

    @action(drives=("scale_gradient",), seed=SEEDS)
    def hook(self, world: World, seed: int) -> object:
        """Call it as a module's hook would; one gradient is missing."""
        grads = [
            filled((3,), param.dtype, "ordinary", seed + index).to(world.device)
            for index, param in enumerate(world.params)
        ]
        return _of(world).scale_gradient(nn.Identity(), (*grads, None), ())

    @action(often=2, drives=("has_overflow",), seed=SEEDS, regime=REGIMES, every=(True, False))
    def look(self, world: World, seed: int, regime: str, every: bool) -> object:
        """Ask whether gradients overflow."""
        for index, param in enumerate(world.params):
            grad = filled(tuple(param.shape), param.dtype, regime, seed + index if seed else 0)
            param.grad = grad.to(world.device) if every or index == 1 else None
        return _of(world).has_overflow(world.params)

    @action(drives=("loss_scale",), scale=(32.0, 2.0**24, 1.0, -1.0, 0.0))
    def assign(self, world: World, scale: float) -> None:
        """Assign the scale."""
        _of(world).loss_scale = scale

    @action(drives=("state_dict",))
    def save(self, world: World) -> object:
        """Keep the state."""
        world.kept = dict(_of(world).state_dict())
        return world.kept

    @action(often=2, drives=("load_state_dict", "restored"), change=("", "cur_scale", "cur_iter"))
    def load(self, world: World, change: str) -> None:
        """Load what was kept, or the state of now; with a change it is refused."""
        state = dict(world.kept or _of(world).state_dict())
        if change:
            state[change] = None
            # Refused before anything changes: the check reports it first.
            _of(world).restored(state)
        _of(world).load_state_dict(state)

    @action(
        drives=("load_state_dict", "restored"), scale=(64.0, 0.0, float("inf")), iteration=(5, 0)
    )
    def enter(self, world: World, scale: float, iteration: int) -> None:
        """Load a state of elsewhere, which is checked first."""
        state = dict(_of(world).state_dict())
        state["cur_scale"] = scale
        if "cur_iter" in state:
            state["cur_iter"] = iteration
        _of(world).restored(state)
        _of(world).load_state_dict(state)

    @action(drives=("load_state_dict",))
    def load_strange(self, world: World) -> None:
        """Try to load the state of the other kind of scaler."""
        state = dict(_of(world).state_dict())
        state["dynamic_loss_scale"] = not state["dynamic_loss_scale"]
        _of(world).load_state_dict(state)
