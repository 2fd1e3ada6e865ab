"""Actions on a class that has torch's public interface, and need have nothing else.

`step` with and without closure, `zero_grad`, `add_param_group`, `state_dict`, `load_state_dict`:
what torch promises of them. Names of the state are the class's own; that it is saved and loaded
shows in the steps that follow. Arguments of the constructor that the class lacks are not passed.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from twinstep.parity.sequences.actions import Action, Motif, Rules, Step, action
from twinstep.parity.sequences.fills import Dice
from twinstep.parity.sequences.motifs import CLEAR, PARTLY, PLAIN, each_turned
from twinstep.parity.sequences.parts import SEEDS, Group
from twinstep.parity.sequences.rules import HOOKS, OptimizerRules
from twinstep.parity.sequences.world import Value, World

ACTIONS = (
    *("build", "fill", "fill_strangely", "freeze", "backward", "train", "step"),
    *("step_with_closure", "zero_grad", "add_group", "add_group_again", "save", "load", "resume"),
    *("set_hyper", "turn_hyper", "lower_rate", "start_scheduler", "scheduler_step"),
)
# Finite gradients: what infinity and NaN do to weights depends on the order of operations.
REGIMES = ("ordinary", "ordinary", "ordinary", "tiny", "zeros", "opposite", "rows")
# Not 0: known classes refuse it, though torch's do not.
RATES = (3.7e-3, 0.25, 0.041, 2.3e-5, 1e-3)
DECAYS = (0.013, 0.31, 0.0, 0.01)
TINY: Step = ("train", {"missing": 0, "regime": "tiny"})


class TorchRules(OptimizerRules):
    """Actions on torch's public interface.

    Attributes:
        needed: arguments of the constructor that a class must take.
        joint: hyper-parameters that depend on one another, as rows that are drawn together.
    """

    exempt = {
        **OptimizerRules.exempt,
        **dict.fromkeys(HOOKS, "kept by torch's base class"),
        "equation": "what step carries out",
    }
    needed: Sequence[str] = ("lr",)
    joint: Sequence[Mapping[str, object]] = ()
    lasting: Motif = ()
    mean = around = 12
    each = 8
    dtypes = ("fp32", "bf16")
    motifs = {
        "each hyper-parameter alone": each_turned(PLAIN),
        "a resume": (PLAIN, PARTLY, "resume", PLAIN, PARTLY, "resume", TINY),
        "a load": (PLAIN, "save", PLAIN, ("turn_hyper", {"number": 0}), "load", PLAIN, PLAIN),
        "a load of a fresh state": ("save", PLAIN, "load", PLAIN),
        "small gradients": (TINY, PLAIN, TINY, TINY),
        "a rate that is scheduled": (
            *(("start_scheduler", {"kind": "onecycle"}), *(PLAIN, "scheduler_step") * 3, PLAIN),
        ),
        "gradients that are missing": (PLAIN, *(PARTLY, CLEAR, "step") * 2, PLAIN),
        "gradients of zero": (PLAIN, ("zero_grad", {"how": "zero"}), "step", "step"),
        "a frozen parameter": (PLAIN, "freeze", "backward", "step", CLEAR, "backward", "step"),
        "a group that comes late": (PLAIN, "add_group", PLAIN, "resume", PLAIN),
        "a closure": (("step_with_closure", {"fails": True}), "step_with_closure", PLAIN),
    }

    def fitted(self, cls: type, place: str) -> Rules:
        """These rules for a class, whose constructor decides which arguments are passed.

        Raises:
            UsageError: it lacks one that is needed, or needs one that is none of torch's.
        """
        takes, needs = constructor(cls)
        lacking = [name for name in ("params", *self.needed) if name not in takes]
        strange = [name for name in needs if name not in self.arguments()]
        if lacking or strange:
            from twinstep.parity.records.errors import UsageError

            says = f"lacks {', '.join(lacking)}" if lacking else f"needs {', '.join(strange)}"
            known = ", ".join(("params", *self._passed()))
            raise UsageError(
                f"the constructor of {cls.__name__} {says}, but should take what it is given by "
                f"name: {known}, of which {', '.join(self.needed)} must be there [{place}]"
            )
        made = copy.copy(self)
        made._fit([name for name in self._passed() if name in takes])
        return made

    def remark(self, cls: type) -> str:
        """Arguments of either side that are not passed."""
        takes, _ = constructor(cls)
        own = [name for name in takes if name not in self.arguments()]
        lacks = [name for name in self._passed() if name not in takes]
        says = [
            f"the constructor of {cls.__name__} is never given {', '.join(own)}" * bool(own),
            f"{cls.__name__} is judged without {', '.join(lacks)}, which it does not take"
            * bool(lacks),
        ]
        return "; ".join(filter(None, says))

    def _passed(self) -> list[str]:
        return [*type(self).hyper, *(self.joint[0] if self.joint else ())]

    def _fit(self, takes: Sequence[str]) -> None:
        self.takes = tuple(takes)
        self.hyper = {name: row for name, row in type(self).hyper.items() if name in takes}

    def arguments(self) -> set[str]:
        """Arguments of the reference's constructor that some action passes."""
        return {"params", *self._passed()}

    def actions(self) -> dict[str, Action]:
        """Those on the public interface; `build` has the arguments that are passed."""
        found = {name: row for name, row in super().actions().items() if name in ACTIONS}
        takes = " ".join(getattr(self, "takes", self._passed()))
        choices = {**found["build"].choices, "takes": (takes,)}
        return {**found, "build": replace(found["build"], choices=choices)}

    @action(
        seed=SEEDS, groups=(1, 1, 2, 3), together=(False, False, True), alike=(False, False, True)
    )
    def build(self, cls: Callable[..., object], dtype: str, device: str, **values: Value) -> World:
        """Groups of parameters, each with hyper-parameters of its own.

        With `together` all parameters of a group are views of one buffer; with `alike` groups
        have the same hyper-parameters; `takes` names those that are passed.
        """
        self._fit(str(values["takes"]).split())
        world = super().build(cls, dtype, device, **{**values, "omitted": False, "extent": ""})
        return replace(world, named=self.takes)

    def drawn_hyper(self, dice: Dice) -> Group:
        """A value for each hyper-parameter that the class takes."""
        rows = [{k: v for k, v in row.items() if k in self.takes} for row in self.joint]
        # Rows that differ in what the class does not take are another's defaults.
        able = [
            row
            for row, whole in zip(rows, self.joint, strict=True)
            if all(not value or name in row for name, value in whole.items())
        ]
        return {**super().drawn_hyper(dice), **(dice.pick(able) if able else {})}

    @action(often=3, seed=SEEDS, regime=REGIMES, missing=(0, 0, 0, *range(8)))
    def fill(self, world: World, seed: int, regime: str, missing: int) -> None:
        """New gradients by bit pattern, but for frozen parameters and by the bits of `missing`."""
        super().fill(world, seed, regime, missing)
        for param in world.params:
            if not param.requires_grad:
                param.grad = None

    @action(seed=SEEDS, layout=("expanded", "transposed"), every=(1, 2))
    def fill_strangely(self, world: World, seed: int, layout: str, every: int) -> None:
        """New gradients in another layout; those of some parameters alone."""
        super().fill_strangely(world, seed, layout, every)

    @action(often=9, drives=("step",), seed=SEEDS, regime=REGIMES, missing=(0, 0, 0, *range(8)))
    def train(self, world: World, seed: int, regime: str, missing: int) -> object:
        """New gradients by bit pattern, then one update; half of the time under no_grad."""
        return super().train(world, seed, regime, missing)

    @action(number=range(4), trained=(False, False, True))
    def freeze(self, world: World, number: int, trained: bool) -> None:
        """Freeze a parameter, which has no gradient then, or train it again."""
        super().freeze(world, number, trained)
        if not trained:
            world.params[number % len(world.params)].grad = None

    @action(drives=("add_param_group",), seed=SEEDS)
    def add_group(self, world: World, seed: int) -> None:
        """Add a group, now and then an empty one; some of its hyper-parameters are the defaults."""
        super().add_group(world, seed)

    @action(often=2, drives=("state_dict",))
    def save(self, world: World) -> None:
        """The state dict through `torch.save`."""
        super().save(world)
        world.saved_bounds = dict(world.bounds)

    def enter(self, world: World, state: dict[str, object]) -> None:
        """Load what was saved last."""
        super().enter(world, state)
        world.bounds = dict(world.saved_bounds)

    def contracts(self, world: World) -> Sequence[object]:
        """One interval of the weights for each parameter with a gradient."""
        from twinstep.parity.sequences.errors_carried import Equation, carried_contracts

        equation: Equation = type(world.optimizer).equation  # type: ignore[attr-defined]
        return carried_contracts(world, equation)


def constructor(cls: type) -> tuple[list[str], list[str]]:
    """Names of a constructor's arguments, and of those without default.

    Where it takes any keywords, those of the next constructor along its bases come after them.
    """
    takes: list[str] = []
    needs: list[str] = []
    for base in cls.__mro__:
        if "__init__" not in vars(base) or base in (torch.optim.Optimizer, object):
            continue
        rows = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        plain = [row for row in rows if row.kind in (row.POSITIONAL_OR_KEYWORD, row.KEYWORD_ONLY)]
        takes += [row.name for row in plain if row.name not in takes]
        needs += [row.name for row in plain if row.default is row.empty and row.name not in needs]
        if all(row.kind is not row.VAR_KEYWORD for row in rows):
            break
    return takes, needs


class TorchAdamWRules(TorchRules):
    """AdamW with torch's interface."""

    hyper = {
        "lr": RATES,
        "betas": ((0.9, 0.999), (0.8765, 0.9987), (0.5, 0.95), (0.0, 0.99)),
        "eps": (1e-8, 3e-6, 1.3e-3, 1e-10),
        "weight_decay": DECAYS,
    }
    needed: Sequence[str] = ("lr", "betas", "eps", "weight_decay")


class TorchAdamRules(TorchAdamWRules):
    """Adam with torch's interface."""

    needed = ("lr", "betas", "eps")


class TorchSGDRules(TorchRules):
    """SGD with torch's interface."""

    hyper = {"lr": RATES, "weight_decay": DECAYS}
    joint = (
        {"momentum": 0.9, "dampening": 0.0, "nesterov": False},
        {"momentum": 0.85, "dampening": 0.0, "nesterov": True},
        {"momentum": 0.6, "dampening": 0.3, "nesterov": False},
        {"momentum": 0.0, "dampening": 0.0, "nesterov": False},
    )

    def has_momentum(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if it has in every group.

        Where it comes later, torch begins a buffer, and a class that keeps one always goes on.
        """
        return all(group.get("momentum") for group in optimizer.param_groups)


class TorchLionRules(TorchRules):
    """Lion with torch's interface."""

    hyper = {
        "lr": RATES,
        "betas": ((0.9, 0.99), (0.87, 0.98), (0.5, 0.7)),
        "weight_decay": DECAYS,
    }
    needed = ("lr", "betas")
