"""Actions on any `torch.optim.Optimizer`."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from twinstep.parity.sequences.actions import Motif, action
from twinstep.parity.sequences.damage import HOW, aged, damaged
from twinstep.parity.sequences.fills import LAYOUTS, NAN, REGIMES, Dice, filled, laid_out
from twinstep.parity.sequences.hyper_rules import HyperRules
from twinstep.parity.sequences.motifs import COMMON, LASTING
from twinstep.parity.sequences.parts import (
    COUNTS,
    EXTENTS,
    FADED,
    GROUPS,
    SEEDS,
    WINDOWS,
    left_out,
    like,
    parameters,
)
from twinstep.parity.sequences.world import Value, World

# What a closure gives back: a number, a tensor that holds it, nothing, more than the loss, or NaN.
LOSSES = ("number", "tensor", "nothing", "pair", "nan")
HOOKS = tuple(
    f"register_{what}_{when}_hook"
    for what in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)
CHANGING = ("register_state_dict_post_hook", "register_load_state_dict_pre_hook")


class OptimizerRules(HyperRules):
    """Actions of every optimizer with torch's interface.

    Attributes:
        options: further arguments of the constructor, for the whole instance.
        refused: values that the constructor should refuse, by argument.
        sparse: whether sparse gradients should be refused; otherwise there are none.
        cpu_offload: whether the reference's `state_dict` takes it.
    """

    exempt: Mapping[str, str] = {
        "profile_hook_step": "torch's wrapper of step, put on by torch",
        "param_groups": "assigned by torch's base class, which `load` has it do",
        "state": "assigned by torch's base class, which `load` has it do",
    }
    cpu_offload: bool = False
    options: Mapping[str, Sequence[object]] = {}
    refused: Mapping[str, Sequence[object]] = {"lr": (-1.0, "fast")}
    sparse: bool = False
    lasting = LASTING
    motifs: Mapping[str, Motif] = COMMON

    @action(
        seed=SEEDS,
        groups=GROUPS,
        together=(False, False, True),
        alike=(False, False, True),
        omitted=(False, False, True),
        extent=EXTENTS,
    )
    def build(self, cls: Callable[..., object], dtype: str, device: str, **values: Value) -> World:
        """Groups of parameters, each with hyper-parameters of its own.

        With `together` all parameters of a group are views of one buffer; with `alike` groups
        have the same hyper-parameters; with `omitted` some arguments are left to their defaults;
        the first group has many parameters, or a large one, by `extent`.
        """
        seed = int(values["seed"])
        dice = Dice(seed)
        groups = []
        for number in range(int(values["groups"])):
            together, extent = bool(values["together"]), str(values["extent"]) * (not number)
            params = parameters(dice, dtype, device, seed + number, together, extent)
            given = {} if values["alike"] else self.drawn_hyper(dice)
            groups.append({"params": params, **given})
        options = {name: dice.pick(row) for name, row in self.options.items()}
        hyper = self.drawn_hyper(dice)
        if values["omitted"]:
            groups = [left_out(dice, group) for group in groups]
            options, hyper = left_out(dice, options), left_out(dice, hyper)
        optimizer = cls(groups, **hyper, **options)
        params = [param for group in groups for param in cast(list[Parameter], group["params"])]
        return World(
            cls=cls,
            options=options,
            params=params,
            optimizer=optimizer,
            device=torch.device(device),
            more={"dtype": dtype},
        )

    def arguments(self) -> set[str]:
        """Arguments of the reference's constructor that some action passes."""
        return super().arguments() | {"params", *self.hyper, *self.options, *self.refused}

    @action(seed=SEEDS)
    def construct_wrongly(self, world: World, seed: int) -> None:
        """Try to construct one with an argument that should be refused."""
        dice = Dice(seed)
        name = dice.pick(tuple(self.refused))
        self.construct(world, {name: dice.pick(self.refused[name])})

    @action(often=0)
    def construct_in_every_wrong_way(self, world: World) -> dict[str, str]:
        """Try each argument that should be refused; what it raises."""
        found = {}
        for name, values in self.refused.items():
            for at, value in enumerate(values):
                try:
                    self.construct(world, {name: value})
                except Exception as error:
                    found[f"{name}[{at}]"] = type(error).__name__
        return found

    def construct(self, world: World, wrong: Mapping[str, object]) -> None:
        """Construct another one over copies of the parameters."""
        world.cls([like(param) for param in world.params], **{**world.options, **wrong})

    @action(often=3, seed=SEEDS, regime=REGIMES[:1] * 4 + REGIMES, missing=(0, 0, 0, *range(8)))
    def fill(self, world: World, seed: int, regime: str, missing: int) -> None:
        """New gradients by bit pattern; bit i of `missing`: none for every third parameter."""
        for index, param in enumerate(world.params):
            if missing >> (index % 3) & 1:
                param.grad = None
                continue
            here = world.regime_at(regime, index, seed)
            grad = filled(tuple(param.shape), param.dtype, here, world.seed_of(index, seed))
            param.grad = grad.to(world.device)

    @action(seed=SEEDS, layout=LAYOUTS, every=(1, 2))
    def fill_strangely(self, world: World, seed: int, layout: str, every: int) -> None:
        """New gradients in another layout; those of some parameters alone."""
        for index, param in enumerate(world.params):
            if (index + seed) % every == 0 and param.requires_grad:
                values = filled(tuple(param.shape), param.dtype, "ordinary", seed + index)
                other = layout if layout != "sparse" or self.sparse else "expanded"
                param.grad = laid_out(values.to(world.device), other)

    @action(often=0, seed=SEEDS, layout=LAYOUTS)
    def fill_last_strangely(self, world: World, seed: int, layout: str) -> None:
        """New gradients; that of the last parameter that can have another layout alone has it."""
        self.fill(world, seed, "ordinary", 0)
        able = [one for one in world.params if one.requires_grad and one.dim() and one.numel()]
        for last in able[-1:]:
            assert last.grad is not None
            other = layout if layout != "sparse" or self.sparse else "expanded"
            last.grad = laid_out(last.grad, other)

    @action(number=range(4), trained=(False, False, True))
    def freeze(self, world: World, number: int, trained: bool) -> None:
        """Freeze a parameter, or train it again."""
        world.params[number % len(world.params)].requires_grad_(trained)

    @action(often=2, seed=SEEDS)
    def backward(self, world: World, seed: int) -> None:
        """Gradients through autograd, on top of those that are there."""
        loss = torch.zeros((), device=world.device)
        for index, param in enumerate(world.params):
            shape, own = tuple(param.shape), world.seed_of(index, seed)
            weight = filled(shape, param.dtype, "ordinary", own)
            loss = loss + (param * weight.to(world.device)).sum()
        if not loss.requires_grad:
            return
        with warnings.catch_warnings():
            # torch remarks on gradients that are laid out otherwise than their parameter.
            warnings.simplefilter("ignore", UserWarning)
            torch.autograd.backward(loss)

    @action(
        often=9,
        drives=("step",),
        seed=SEEDS,
        regime=REGIMES[:1] * 4 + REGIMES,
        missing=(0, 0, 0, *range(8)),
    )
    def train(self, world: World, seed: int, regime: str, missing: int) -> object:
        """New gradients by bit pattern, then one update; half of the time under no_grad."""
        self.fill(world, seed, regime, missing)
        with torch.set_grad_enabled(seed % 2 == 0):
            loss = self.step(world)
            world.events.append(f"gradients {torch.is_grad_enabled()} behind a step")
        return loss

    @action(often=5, drives=("step",))
    def step(self, world: World) -> object:
        """Update once."""
        world.updating()
        return world.torch_optimizer.step()  # type: ignore[call-overload, unused-ignore]

    @action(drives=("step",), seed=SEEDS, fails=(False, False, True), gives=LOSSES)
    def step_with_closure(self, world: World, seed: int, fails: bool, gives: str) -> object:
        """Update once, with gradients that the closure makes, unless it raises an error."""
        tensor = torch.full((1, 1), 0.5, device=world.device)
        loss = {"number": 0.5, "tensor": tensor, "pair": (0.5, "x"), "nan": NAN}.get(gives)

        def closure() -> object:
            self.fill(world, seed, "ordinary", 0)
            world.events.append(f"closure, gradients {torch.is_grad_enabled()}")
            if fails:
                raise RuntimeError("no more data")
            world.updating()
            return loss

        with torch.enable_grad():
            try:
                # What was returned is looked at again after every later action.
                last = world.torch_optimizer.step(cast(Callable[[], float], closure))
                world.more["losses"] = [
                    *cast(list[object], world.more.get("losses", []))[-1:],
                    last,
                ]
                return last
            finally:
                world.events.append(f"gradients {torch.is_grad_enabled()} behind a step")

    @action(often=2, drives=("zero_grad",), how=("as it is", "drop", "zero"))
    def zero_grad(self, world: World, how: str) -> object:
        """Drop or zero the gradients, which the caller holds."""
        held = [param.grad for param in world.params]
        if how == "as it is":
            world.torch_optimizer.zero_grad()
        else:
            world.torch_optimizer.zero_grad(set_to_none=how == "drop")
        return held

    @action(drives=("add_param_group",), seed=SEEDS)
    def add_group(self, world: World, seed: int) -> None:
        """Add a group, now and then an empty one; some of its hyper-parameters are the defaults."""
        dice = Dice(seed)
        dtype = str(world.more["dtype"])
        params = parameters(dice, dtype, str(world.device), seed, together=False)
        params = params if seed % 8 != 3 else []
        given = {k: v for k, v in self.drawn_hyper(dice).items() if dice.pick((False, True))}
        world.torch_optimizer.add_param_group({"params": params, **given})
        world.params += params
        world.scheduler = None

    @action(drives=("add_param_group",))
    def add_group_again(self, world: World) -> None:
        """Try to add a parameter that is there already."""
        world.torch_optimizer.add_param_group({"params": [world.params[0]]})

    @action(often=2, drives=("state_dict",))
    def save(self, world: World) -> object:
        """The state dict through `torch.save`; what can be read back is compared."""
        file = io.BytesIO()
        torch.save(world.torch_optimizer.state_dict(), file)
        world.saved = file.getvalue()
        return self._read(world)

    def _read(self, world: World) -> dict[str, object]:
        assert world.saved is not None
        loaded = torch.load(io.BytesIO(world.saved), weights_only=True, map_location=world.device)
        return cast(dict[str, object], loaded)

    @action(often=2, drives=("load_state_dict",))
    def load(self, world: World) -> None:
        """Load what was saved into the present optimizer."""
        if world.saved is None:
            self.save(world)
        self.enter(world, self._read(world))

    @action(often=2, drives=("load_state_dict",), seed=SEEDS)
    def resume(self, world: World, seed: int) -> None:
        """Save now; load into a new instance over copies of the parameters, other defaults."""
        self.save(world)
        dice = Dice(seed)
        groups = world.torch_optimizer.param_groups
        copies = [like(param) for param in world.params]
        copy_of = dict(zip(world.params, copies, strict=True))
        parts = [{"params": [copy_of[param] for param in group["params"]]} for group in groups]
        world.optimizer = world.cls(parts, **self.drawn_hyper(dice), **world.options)
        world.params, world.scheduler = copies, None
        self.enter(world, self._read(world))

    @action(drives=("state_dict",), offloaded=(False, True))
    def keep(self, world: World, offloaded: bool) -> None:
        """Keep a state dict in memory, on the CPU where a class offers it, and watch it."""
        state_dict: Any = world.torch_optimizer.state_dict
        takes = inspect.signature(state_dict).parameters
        words = any(one.kind is one.VAR_KEYWORD for one in takes.values())
        world.kept_on_cpu = offloaded and self.cpu_offload and ("cpu_offload" in takes or words)
        world.kept = state_dict(cpu_offload=True) if world.kept_on_cpu else state_dict()

    @action(often=2, drives=("load_state_dict",))
    def load_kept(self, world: World) -> None:
        """Load the state dict that was kept, or the one of now through a file."""
        if world.kept is None:
            self.save(world)
            world.kept = self._read(world)
        world.torch_optimizer.load_state_dict(world.kept)

    def enter(self, world: World, state: dict[str, object]) -> None:
        """Load a state dict, which stays the caller's."""
        with world.lent(state):
            world.torch_optimizer.load_state_dict(state)

    @action(drives=("load_state_dict",), seed=SEEDS, how=HOW)
    def load_damaged(self, world: World, seed: int, how: str) -> None:
        """Try to load the state of now with one entry that is gone or makes no sense.

        Where it is taken, the whole state is loaded again: a step on nonsense may raise anything.
        """
        self.save(world)
        self.enter(world, damaged(self._read(world), seed, how))
        self.enter(world, self._read(world))

    @action(drives=("load_state_dict",), count=(*COUNTS, *FADED), since=WINDOWS)
    def age(self, world: World, count: int, since: int) -> None:
        """Load the state of now with counters as after a long run."""
        self.save(world)
        self.enter(world, aged(self._read(world), count, since))

    @action(count=(3, *FADED))
    def set_counts(self, world: World, count: int) -> None:
        """Set the counters of steps in place."""
        for state in getattr(world.torch_optimizer, "state", {}).values():
            if isinstance(state.get("step"), Tensor):
                state["step"].fill_(count)

    @action(how=("deepcopy", "pickle"))
    def copy(self, world: World, how: str) -> None:
        """Go on with a copy of optimizer and parameters."""
        pair = (world.optimizer, world.params)
        copied = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
        world.optimizer, world.params = copied
        world.scheduler = None

    @action(drives=HOOKS)
    def watch(self, world: World) -> None:
        """Register every kind of hook; their arguments and order are compared.

        Those that may give another state dict do: with lower rates.
        """
        events = world.events

        def told(what: str) -> Callable[..., object]:
            def hook(*given: object) -> object:
                events.append(f"{what} with {len(given)} arguments")
                # A BF16 optimizer is given a list of states, one for each rank.
                if what not in CHANGING or not isinstance(given[1], Mapping):
                    return None
                return _with_lower_rates(given[1])

            return hook

        for name in HOOKS:
            getattr(world.torch_optimizer, name)(told(name))


def _with_lower_rates(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict with half of each learning rate that is a number."""
    groups = [
        {**group, "lr": 0.5 * group["lr"] if isinstance(group.get("lr"), float) else group["lr"]}
        for group in state.get("param_groups", ())
    ]
    return {**state, "param_groups": groups} if groups else dict(state)
