"""Actions on a loss scale with the interface of `DynamicLossScale`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, cast

import numpy
import torch
from torch import Tensor, nn

from twinstep.parity.sequences.actions import Rules, action
from twinstep.parity.sequences.damage import HOW, aged, damaged
from twinstep.parity.sequences.fills import DTYPES, INF, NAN, REGIMES, Dice, filled
from twinstep.parity.sequences.motifs import STEPS
from twinstep.parity.sequences.parts import (
    COUNTS,
    GRAPHS,
    SEEDS,
    WINDOWS,
    backward_twice,
    curved,
    left_out,
    parameters,
)
from twinstep.parity.sequences.world import Act, Value, World

SCALE_RULES = ("dynamic", "wrapper", "torch")
OVERFLOW, CLEAN = ("update", {"overflow": True}), ("update", {"overflow": False})
LOAD = ("load", {"change": ""})
HIT: Mapping[str, Value] = {"regime": "planted", "once": True}
# Constructor arguments of a scale that moves, each with values that make no sense.
SCALES = (0.0, -1.0, NAN, INF, "large", True)
REFUSED: Mapping[str, Sequence[object]] = {
    "rule": ("static", "other", None),
    "init_scale": SCALES,
    "scale_window": (0, -1),
}
CONSTANTS = (
    *("rule", "init_scale", "scale_factor", "scale_window", "min_scale", "delayed_shift"),
    *("backoff_factor", "consecutive_hysteresis", "raise_error_at_min_scale"),
)
# Constants of another run, which files have for DeepSpeed's sake.
ELSEWHERE: Mapping[str, object] = {"scale_window": 7, "scale_factor": 3.0}
FLAGS: Mapping[str, Callable[[bool], object]] = {
    "bool": bool,
    "int": int,
    "tensor": torch.tensor,
    "numpy": numpy.bool_,
}
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

    def has_overflow(self, params: Iterable[nn.Parameter]) -> bool:
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

    exempt = {
        "after": "the rule as a pure function, which is a kernel on the other side",
        "compat": "upstream behaviour of our own classes; others are judged by the default",
    }
    passed = ("scale", *CONSTANTS)
    lasting = ("update",) * STEPS
    motifs = {
        "an overflow before a save": (OVERFLOW, "save", LOAD, "update"),
        **{
            f"a save in a streak of overflows, {rule}": (
                ("build", {"rule": rule, "omitted": False}),
                *("save", OVERFLOW, LOAD, OVERFLOW, "save"),
                *(OVERFLOW, OVERFLOW, LOAD, OVERFLOW, CLEAN, CLEAN, CLEAN),
            )
            for rule in SCALE_RULES
        },
        **{
            f"a budget of another run, with {shift}": (
                ("build", {"rule": "dynamic", "shift": shift, "omitted": False}),
                *(("enter", {"scale": 64.0, "iteration": 5}), OVERFLOW, OVERFLOW, CLEAN),
            )
            for shift in (1, 2)
        },
        "the edge of a window": (("age", {"since": 998}), CLEAN, CLEAN, CLEAN, CLEAN),
        "overflow at the edge of a window": (("age", {"since": 999}), CLEAN, OVERFLOW, CLEAN),
        "24 bits of counters full": (("age", {"count": 2**24 - 2}), CLEAN, OVERFLOW, CLEAN, CLEAN),
        "31 bits of counters full": (("age", {"count": 2**31 - 2}), CLEAN, OVERFLOW, CLEAN, CLEAN),
        "an overflow among parameters read once": (
            *(("look", {**HIT, "every": False}),) * 2,
            ("look", HIT),
        ),
        "the floor": (("assign", {"scale": 1.0}), *(OVERFLOW,) * 4, "backward", "update"),
        "seventeen overflows in a row": (
            ("build", {"rule": "dynamic", "omitted": False, "raises": False}),
            *(("assign", {"scale": 2.0**24}), *(OVERFLOW,) * 17, CLEAN),
        ),
        "flags of every kind": tuple(
            ("update", {"overflow": overflow, "kind": kind})
            for kind in FLAGS
            for overflow in (True, False)
        ),
        "scales that are none": (
            *(("assign", {"scale": scale}) for scale in (NAN, INF, -1.0, 0.0)),
            "backward",
        ),
        "graphs that are kept": (("backward", {"graph": "retain"}), "backward"),
        "a damaged state": ("update", "load_damaged", "load_damaged", "update"),
        "a refused construction": ("construct_wrongly",) * 4,
    }

    @action(
        seed=SEEDS,
        rule=SCALE_RULES,
        shift=(2, 1, 3),
        consecutive=(False, False, True),
        raises=(False, False, True),
        omitted=(False, False, True),
    )
    def build(self, cls: Callable[..., object], dtype: str, device: str, **values: Value) -> World:
        """A scaler whose windows are short for the most part, and a few parameters."""
        seed = int(values["seed"])
        dice = Dice(seed)
        options: dict[str, object] = {"scale": dice.pick((8.0, 2.0**16, 3.7))}
        if getattr(cls, "dynamic"):  # noqa: B009
            options = {
                "rule": values["rule"],
                "init_scale": options["scale"],
                "scale_factor": dice.pick((2.0, 1.7, 1e30)),
                "scale_window": dice.pick((1, 2, 3, 1000)),
                "min_scale": dice.pick((1.0, 3.0, 0.01)),
                "delayed_shift": values["shift"],
                "backoff_factor": dice.pick((0.5, 0.3)),
                "consecutive_hysteresis": values["consecutive"],
                "raise_error_at_min_scale": values["raises"],
            }
        if values["omitted"]:
            options = left_out(dice, options)
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

    @action(often=9, drives=("update_scale",), overflow=(False, False, True), kind=(*FLAGS, "bool"))
    def update(self, world: World, overflow: bool, kind: str) -> None:
        """A step that overflowed or did not; flags that ranks agree on are no plain bools."""
        _of(world).update_scale(cast(bool, FLAGS[kind](overflow)))

    @action(seed=SEEDS)
    def construct_wrongly(self, world: World, seed: int) -> None:
        """Try to construct one with an argument that should be refused."""
        dynamic = getattr(world.cls, "dynamic")  # noqa: B009
        refused = REFUSED if dynamic else {"scale": SCALES}
        name, value = Dice(seed).pick(
            [(name, value) for name in refused for value in refused[name]]
        )
        world.cls(**{**world.options, name: value})

    @action(
        often=2, drives=("backward", "scale_loss"), seed=SEEDS, loss=tuple(DTYPES), graph=GRAPHS
    )
    def backward(self, world: World, seed: int, loss: str, graph: str) -> object:
        """Gradients of a scaled loss; a scaled term of it is compared, too.

        The loss itself is a sum, which devices add up in orders of their own.
        """
        total = torch.zeros((), device=world.device)
        for index, param in enumerate(world.params):
            weight = filled(tuple(param.shape), param.dtype, "ordinary", seed + index)
            total = total + curved((param * weight.to(world.device)).float(), graph).sum()
        total = total.to(DTYPES[loss])
        backward_twice(_of(world).backward, total, graph)
        term = world.params[0].detach().reshape(-1)[:1].sum().to(DTYPES[loss])
        return _of(world).scale_loss(term)

    @action(drives=("scale_gradient",), seed=SEEDS)
    def hook(self, world: World, seed: int) -> object:
        """Call it as a module's hook would; one gradient is missing, some are 0-dim."""
        grads = [
            filled((3,) * (seed % 4 > 0), param.dtype, "ordinary", seed + index).to(world.device)
            for index, param in enumerate(world.params)
        ]
        return _of(world).scale_gradient(nn.Identity(), (*grads, None), ()), grads

    @action(
        often=2,
        drives=("has_overflow",),
        seed=SEEDS,
        regime=REGIMES,
        every=(True, False),
        once=(False, False, True),
    )
    def look(self, world: World, seed: int, regime: str, every: bool, once: bool) -> object:
        """Ask whether gradients overflow; `once`: of parameters that can be read once alone."""
        for index, param in enumerate(world.params):
            here = world.regime_at(regime, index, seed) if every else regime
            grad = filled(tuple(param.shape), param.dtype, here, seed + index if seed else 0)
            param.grad = grad.to(world.device) if every or index == 1 else None
            # A parameter may have been frozen since its gradient came.
            param.requires_grad_(seed % 3 > 0)
        return _of(world).has_overflow(iter(world.params) if once else world.params)

    @action(often=2, seed=SEEDS)
    def look_at_many(self, world: World, seed: int) -> object:
        """Ask whether gradients of many parameters overflow, of which one may be infinite."""
        params = [torch.nn.Parameter(torch.ones(1, device=world.device)) for _ in range(300)]
        params = params[seed % 200 :]
        for index, param in enumerate(params):
            hit = seed % 3 and index == seed % len(params)
            param.grad = torch.full_like(param, INF if hit else 1.0)
        return _of(world).has_overflow(params)

    @action(drives=("loss_scale",), scale=(32.0, 2.0**24, 1.0, -1.0, 0.0, INF, NAN))
    def assign(self, world: World, scale: float) -> None:
        """Assign the scale."""
        _of(world).loss_scale = scale

    @action(drives=("state_dict",))
    def save(self, world: World) -> object:
        """Keep the state."""
        # The very dict: later calls may not write into it.
        world.kept = world.more["kept"] = _of(world).state_dict()
        return world.kept

    @action(often=2, drives=("load_state_dict", "restored"), change=("", "cur_scale", "cur_iter"))
    def load(self, world: World, change: str) -> None:
        """Load what was kept, or the state of now; with a change it is refused."""
        state = dict(world.kept or _of(world).state_dict())
        if change:
            state[change] = None
            # Refused before anything changes: the check reports it first.
            _of(world).restored(state)
        with world.lent(state):
            _of(world).load_state_dict(state)

    @action(
        drives=("load_state_dict", "restored"),
        scale=(64.0, 0.0, INF, NAN, -1.0),
        iteration=(5, 0, 2**31, -7),
    )
    def enter(self, world: World, scale: float, iteration: int) -> None:
        """Load a state of elsewhere, which is checked first."""
        state = {**_of(world).state_dict(), **ELSEWHERE, "cur_scale": scale}
        if "cur_iter" in state:
            state["cur_iter"] = iteration
        if "cur_hysteresis" in state:
            # More than this scaler has after an overflow of its own, for one.
            state["cur_hysteresis"] = max(1, iteration % 5_000)
        _of(world).restored(state)
        with world.lent(state):
            _of(world).load_state_dict(state)

    @action(drives=("load_state_dict",), count=COUNTS, since=WINDOWS)
    def age(self, world: World, count: int, since: int) -> None:
        """Load the state of now with counters as after a long run."""
        with world.lent(aged(dict(_of(world).state_dict()), count, since)) as state:
            _of(world).load_state_dict(state)

    @action(drives=("load_state_dict",), seed=SEEDS, how=HOW)
    def load_damaged(self, world: World, seed: int, how: str) -> None:
        """Try to load the state of now with one entry that is gone or makes no sense."""
        with world.lent(damaged(dict(_of(world).state_dict()), seed, how)) as state:
            _of(world).load_state_dict(state)

    @action(drives=("load_state_dict",))
    def load_strange(self, world: World) -> None:
        """Try to load the state of the other kind of scaler."""
        state = dict(_of(world).state_dict())
        state["dynamic_loss_scale"] = not state["dynamic_loss_scale"]
        with world.lent(state):
            _of(world).load_state_dict(state)
