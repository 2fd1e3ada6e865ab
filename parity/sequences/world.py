"""One side of a twin: an optimizer, its parameters, and what has been kept along the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from twinstep.parity.sequences.observe import Observation, Places, Walk

Value = bool | int | float | str


@cache
def machinery() -> frozenset[str]:
    """Names that torch's base class and its schedulers keep on an optimizer for themselves.

    Our wrappers keep two of their own, by which they log once that gradients are not their own.
    Found out when it is needed: torch's first optimizer loads its compiler, which takes seconds.
    """
    plain = vars(torch.optim.SGD([torch.zeros(1)])).keys()
    ours = frozenset({"step", "_opt_called", "_asked", "_mark"})
    return ours | (plain - {"defaults", "state", "param_groups"})


@dataclass(frozen=True)
class Act:
    """One action with its arguments, as plain data.

    Attributes:
        name: of the rule.
        values: its arguments.
    """

    name: str
    values: Mapping[str, Value] = field(default_factory=dict)

    def __str__(self) -> str:
        """As a call."""
        inside = ", ".join(f"{name}={value!r}" for name, value in self.values.items())
        return f"{self.name}({inside})"


def nothing() -> None:
    """Do nothing."""


class OnRank(Protocol):
    """A simulated rank, as far as values depend on it."""

    def seed_of(self, param: Tensor, seed: int, gradient: bool) -> int:
        """Seed of values of the piece of a parameter that this rank holds."""

    def is_hit(self, param: Tensor, seed: int) -> bool:
        """True if an overflow hits this rank's piece of a parameter."""


@dataclass
class World:
    """State that a sequence of actions works on.

    Attributes:
        cls: the optimizer's class.
        options: arguments of its constructor that are no hyper-parameters of a group.
        params: parameters, in the order of their groups.
        optimizer: under test.
        device: where the parameters are.
        saved: a state dict as bytes of `torch.save`, or None.
        kept: a state dict as it was returned, or None.
        kept_on_cpu: that state dict was asked for in the memory of the CPU.
        scheduler: the learning-rate scheduler in use, or None.
        events: what hooks received.
        more: anything that rules of a certain class want to keep; it is observed like the rest.
        places: of the tensors of parameters and optimizer at the last observation.
        updating: to be called right before parameters are updated, gradients being final.
        rank: that this side is on; None for one that is alone.
        named: entries of groups, where nothing else of the optimizer is looked at.
        bounds: state by number of parameter, with the errors of a bounded class; not observed.
        saved_bounds: the same when the state was saved.
    """

    cls: Callable[..., object]
    options: dict[str, object]
    params: list[Parameter]
    optimizer: object
    device: torch.device
    saved: bytes | None = None
    kept: dict[str, object] | None = None
    kept_on_cpu: bool = False
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    events: list[str] = field(default_factory=list)
    more: dict[str, object] = field(default_factory=dict)
    places: Places = field(default_factory=dict)
    updating: Callable[[], None] = nothing
    rank: OnRank | None = None
    named: Sequence[str] = ()
    bounds: dict[int, dict[str, object]] = field(default_factory=dict)
    saved_bounds: dict[int, dict[str, object]] = field(default_factory=dict)

    def seed_of(self, index: int, seed: int, *, gradient: bool = True) -> int:
        """Seed of values of the parameter of a number; 0, the plain one, for all of seed 0."""
        own = seed + index if seed else 0
        if self.rank is None or not own:
            return own
        return self.rank.seed_of(self.params[index], own, gradient)

    def hits(self, seed: int) -> set[int]:
        """Numbers of the parameters whose gradients an overflow hits: one for most seeds, or all.

        Those that are trained and have elements, where there are any: others show no overflow.
        """
        # Over ranks it is a parameter of one number everywhere, and others are empty on each.
        able = [
            at
            for at, param in enumerate(self.params)
            if param.requires_grad and (param.numel() or self.rank is not None)
        ] or list(range(len(self.params)))
        hit = able if seed % 4 == 0 or not able else [able[seed % len(able)]]
        return {at for at in hit if self.rank is None or self.rank.is_hit(self.params[at], seed)}

    def regime_at(self, regime: str, index: int, seed: int) -> str:
        """The regime of one parameter's gradient; an overflow need not be in all of them."""
        return "ordinary" if regime == "planted" and index not in self.hits(seed) else regime

    @property
    def offloads(self) -> bool:
        """True if an option puts state into the memory of the CPU, where the reference has all."""
        return self.options.get("offload_optimizer_config") is not None

    @contextmanager
    def lent(self, state: dict[str, object]) -> Iterator[dict[str, object]]:
        """Note the entries of its caller's dict that a call changes; what tensors hold apart."""
        before = {key: _told(value) for key, value in state.items()}
        try:
            yield state
        finally:
            after = {key: _told(value) for key, value in state.items()}
            changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
            self.more["given"] = ", ".join(sorted(map(str, changed)))

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, typed as torch's."""
        return cast(torch.optim.Optimizer, self.optimizer)


def _told(value: object) -> object:
    if isinstance(value, dict):
        return {key: _told(row) for key, row in value.items()}
    if isinstance(value, list | tuple):
        return [_told(row) for row in value]
    return repr(value) if isinstance(value, int | float | str) else type(value)


def observe(
    world: World,
    *,
    outcome: Mapping[str, object],
    properties: Sequence[str] = (),
    private: Sequence[str] = (),
    overlap: bool = False,
) -> Observation:
    """All that can be seen of a world.

    Args:
        world: one side.
        outcome: what the last action returned or raised.
        properties: names of the optimizer's properties, read after every action.
        private: attributes of the optimizer that are its own business.
        overlap: count memory as shared only where bytes are.
    """
    hidden = frozenset(f"optimizer.{name}" for name in (*machinery(), *private))
    # An attribute of one class may be a property of the other, and comes with the properties.
    later = frozenset(f"optimizer.{name}" for name in properties)
    walk = Walk(
        home=world.device,
        skipped=hidden | later,
        offloads=world.offloads,
        overlap=overlap,
        before=world.places,
    )
    walk.root("params", world.params)
    walk.root("grads", [param.grad for param in world.params])
    if world.named:
        names = ("params", *world.named)
        groups = [
            {name: group[name] for name in names if name in group} for group in _groups(world)
        ]
        walk.root("optimizer.param_groups", groups)
    else:
        walk.root("optimizer", world.optimizer)
    walk.skipped = hidden
    for name in properties:
        walk.root(f"optimizer.{name}", read(world.optimizer, name))
    # What comes next may be made anew.
    world.places, walk.places, walk.before = walk.places, {}, {}
    walk.offloads = world.offloads or world.kept_on_cpu
    walk.root("kept", world.kept)
    walk.offloads = world.offloads
    # Dicts of arguments stay the caller's.
    walk.root("arguments", {name: row for name, row in world.options.items() if _plain(row)})
    for number, event in enumerate(world.events):
        walk.root(f"events[{number}]", event)
    walk.root("more", world.more)
    walk.root("outcome", dict(outcome))
    return walk.leaves


def _groups(world: World) -> Sequence[Mapping[str, object]]:
    return cast("Sequence[Mapping[str, object]]", read(world.optimizer, "param_groups"))


def _plain(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(row, int | float) for row in value.values())


def read(optimizer: object, name: str) -> object:
    """A property's value; what it raises is seen like a value."""
    try:
        return getattr(optimizer, name)
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"


Result = TypeVar("Result")
# What arguments of methods are where they are left out.
LEFT_OUT: Mapping[str, object] = {
    "load_optimizer_states": True,
    "load_from_fp32_weights": False,
    "update_hp_grads": True,
    "clear_lp_grads": False,
    "for_clipping": False,
    "set_to_none": False,
}


def spared(world: World, method: Callable[..., Result], *given: object, **named: object) -> Result:
    """Call a method; every second time, the first too, without the defaults in `LEFT_OUT`."""
    turn = world.more["spared"] = not world.more.get("spared", False)
    kept = {name: v for name, v in named.items() if not turn or LEFT_OUT.get(name) is not v}
    return method(*given, **kept)
