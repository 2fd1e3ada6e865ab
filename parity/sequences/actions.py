"""Rule sets, which declare the actions on an optimizer.

    class MyRules(OptimizerRules):
        @action(drives=("override_loss_scale",), scale=(128.0, 1.0, 2.0**16))
        def override(self, world, scale):
            world.optimizer.override_loss_scale(scale)

Every argument is a sequence of plain values to draw from, the simplest first: failures are shrunk
towards it. Needs nothing but the standard library and torch.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

import torch

from twinstep.parity.sequences.world import Act, Value, World

Method = TypeVar("Method", bound=Callable[..., object])
MARK = "_twin_action"
# An action, or one with some arguments fixed. One that builds comes first.
Step = str | tuple[str, Mapping[str, Value]]
Motif = Sequence[Step]


@dataclass(frozen=True, kw_only=True)
class Action:
    """A declared action.

    Attributes:
        name: of the method.
        drives: public methods of the optimizer that it calls.
        often: how often it is drawn, relative to others.
        choices: values of each argument, the simplest first.
    """

    name: str
    drives: tuple[str, ...]
    often: int
    choices: Mapping[str, Sequence[Value]]

    def draw(self, dice: Random, fixed: Mapping[str, Value] | None = None) -> Act:
        """This action with drawn arguments, but for those that are fixed."""
        drawn = {name: dice.choice(row) for name, row in self.choices.items()}
        return Act(self.name, {**drawn, **(fixed or {})})

    def allows(self, fixed: Mapping[str, Value]) -> bool:
        """True if arguments may have these values."""
        return all(value in self.choices.get(name, ()) for name, value in fixed.items())


def action(
    *, drives: Sequence[str] = (), often: int = 1, **choices: Sequence[Value]
) -> Callable[[Method], Method]:
    """Declare a method of a rule set as an action; it is called with the world and the arguments.

    Args:
        drives: public methods of the optimizer that it calls.
        often: how often it is drawn, relative to others.
        choices: for each argument, what it is drawn from, the simplest first.
    """

    def decorate(method: Method) -> Method:
        declared = Action(
            name=method.__name__, drives=tuple(drives), often=often, choices=dict(choices)
        )
        setattr(method, MARK, declared)
        return method

    return decorate


class Rules:
    """Base of all rule sets: collects the actions, subclasses' replacing their parents'.

    Attributes:
        exempt: public methods that no action drives, and constructor arguments that none passes,
            and why.
        passed: arguments of the reference's constructor that `build` passes.
        motifs: runs of actions that random drawing rarely meets, by name.
        lasting: a long run, first the action that it mostly consists of; empty for none.
        mean: drawn actions of a sequence on average, without a motif.
        around: the same, around one.
        least: sequences over ranks that a run has at least.
        each: sequences on one rank for each case of the value law.
        dtypes: of parameters that a class claims if it names none.
        parts: rules over ranks and those that they were added to, where this class is made of both.
    """

    exempt: Mapping[str, str] = {}
    passed: Sequence[str] = ()
    motifs: Mapping[str, Motif] = {}
    lasting: Motif = ()
    mean: int = 16
    around: int = 16
    least: int = 0
    each: int = 13
    dtypes: Sequence[str] = ("fp16", "bf16", "fp32")
    parts: tuple[type[Rules], ...] = ()

    def build(self, cls: Callable[..., object], dtype: str, device: str, **values: Value) -> World:
        """A world to begin with. Declared with `action` as well, so that it draws and shrinks."""
        raise TypeError(f"{type(self).__name__} has no build, but should make a world [{cls}]")

    def actions(self) -> dict[str, Action]:
        """Every action by name, `build` too."""
        found: dict[str, Action] = {}
        for name in dir(type(self)):
            declared = getattr(getattr(type(self), name), MARK, None)
            if isinstance(declared, Action):
                found[name] = declared
        return found

    def driven(self) -> set[str]:
        """Public methods that some action calls."""
        return {method for row in self.actions().values() for method in row.drives}

    def apply(self, world: World, act: Act) -> object:
        """Carry out an action; what it returns is compared."""
        return getattr(self, act.name)(world, **act.values)

    def contracts(self, world: World) -> Sequence[object]:
        """Contracts of one update, for bounded twins; see `parity.sequences.contracts`."""
        return ()

    def arguments(self) -> set[str]:
        """Arguments of the reference's constructor that some action passes."""
        return set(self.passed)

    def fitted(self, cls: type, place: str) -> Rules:
        """These rules for a class: the arguments that it takes decide what is passed.

        Args:
            cls: the class under judgement.
            place: its file and line.
        """
        return self

    def remark(self, cls: type) -> str:
        """Parts of a class that are not judged, in one sentence, or ""."""
        return ""

    def scripts(self) -> list[Motif]:
        """Motifs whose actions, and the values of whose arguments, this rule set has."""
        known = self.actions()

        def possible(name: str, fixed: Mapping[str, Value]) -> bool:
            return name in known and known[name].allows(fixed)

        rows = self.motifs.values()
        return [row for row in rows if all(possible(*fixed_step(step)) for step in row)]

    def extended(self, fixed: Mapping[str, Value]) -> Motif:
        """A build with these values, and two steps plain but for their gradients; or nothing.

        In a crowd, some of the gradients are missing in one step more.
        """
        known = self.actions()
        if not known["build"].allows(fixed) or not self.lasting:
            return ()
        name, _ = fixed_step(self.lasting[0])
        choices = known[name].choices.items()
        plain = {one: row[0] for one, row in choices if one != "seed"}
        partly = {**plain, "missing": 1}
        more = "missing" in plain and "crowd" in str(fixed.get("extent"))
        return (("build", fixed), *((name, plain),) * 2, *((name, partly),) * more)


def fixed_step(step: Step) -> tuple[str, Mapping[str, Value]]:
    """Name of a motif's action, and the values that are fixed."""
    return (step, {}) if isinstance(step, str) else step


def public_methods(cls: type) -> set[str]:
    """Names of a class's public methods, inherited ones too; properties are no methods."""
    names = (name for name in dir(cls) if not name.startswith("_"))
    return {name for name in names if inspect.isroutine(getattr(cls, name, None))}


def read_properties(reference: type, subject: type) -> tuple[str, ...]:
    """Names of properties that are read after every action.

    Those with an underscore that both classes have are names of other projects, which engines read.
    An attribute that the reference stores may be a property of the class.
    """
    known = set(dir(torch.optim.Optimizer))
    names = (name for name in dir(reference) if name.startswith("_") and name not in known)
    both = [name for name in names if isinstance(getattr(reference, name), property)]
    shared = (name for name in both if isinstance(getattr(subject, name, None), property))
    stored = stored_attributes(reference).intersection(public_properties(subject))
    return (*public_properties(reference), *shared, *sorted(stored))


def stored_attributes(cls: type) -> frozenset[str]:
    """Names of attributes that methods of a class or its bases assign, and no property has."""
    methods = (
        one for base in cls.__mro__ for one in vars(base).values() if inspect.isfunction(one)
    )
    rows = (row for method in methods for row in dis.get_instructions(method))
    names = {str(row.argval) for row in rows if row.opname == "STORE_ATTR"}
    return frozenset(names.difference(public_properties(cls)))


def public_properties(cls: type) -> tuple[str, ...]:
    """Names of a class's public properties."""
    names = (name for name in dir(cls) if not name.startswith("_"))
    return tuple(name for name in names if isinstance(getattr(cls, name), property))
