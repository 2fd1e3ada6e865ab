"""Actions on an optimizer with the interface of `FP16Optimizer`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from twinstep.parity.sequences.actions import Action, action
from twinstep.parity.sequences.fills import Dice, filled
from twinstep.parity.sequences.fp16_recipes import ANY, RECIPES, Recipe, recipe_named
from twinstep.parity.sequences.rules import (
    SEEDS,
    OptimizerRules,
    like,
    optimizers_of,
    parameters,
    side_of,
)
from twinstep.parity.sequences.world import Act, Value, World

Group = dict[str, object]
ADAM = {
    "lr": (3.7e-3, 0.25, 2.3e-5),
    "betas": ((0.8765, 0.9987), (0.5, 0.95), (0.0, 0.99995)),
    "eps": (3e-6, 1.3e-3),
    "weight_decay": (0.013, 0.0, 0.31, -0.02),
    # Rarely switched: kernels are compiled for either.
    "bias_correction": (*(True,) * 7, False),
}
MARKS: tuple[Mapping[str, object], ...] = (
    {},
    {"allreduce": False, "group_name": "some"},
    {"allreduce": False, "group_name": "other"},
    {"ds_pipe_replicated": True},
)


class _Scaler(Protocol):
    dynamic: bool

    def state_dict(self) -> dict[str, object]:
        """State of the rule."""


class Scaled(Protocol):
    """The interface beyond that of torch's optimizers."""

    loss_scale: float
    overflow: bool
    clip_grad: float
    loss_scaler: _Scaler
    load_state_dict: Callable[..., None]

    def initialize_optimizer_states(self) -> None:
        """Make all state."""

    def backward(self, loss: Tensor, create_graph: bool, retain_graph: bool) -> None:
        """Run backward from the scaled loss."""

    def override_loss_scale(self, loss_scale: float | None) -> None:
        """Put an external scale in force, or end it."""

    def refresh_fp32_params(self) -> None:
        """Masters from model weights."""

    def get_global_norm(self) -> float:
        """Norm of the last step."""

    def memory_report(self) -> dict[str, int]:
        """Bytes by kind."""

    def set_lr(self, lr: float) -> None:
        """One learning rate for all groups."""

    def get_lr(self) -> float:
        """That of the first group."""


def scaled(world: World) -> Scaled:
    """The optimizer, typed."""
    return cast(Scaled, world.optimizer)


class FP16Rules(OptimizerRules):
    """Loss scaling, masters and everything around them, over several optimizers inside.

    After every action the scalars of the last step are read and compared with everything else.

    Attributes:
        recipes: ways to build a wrapper, by name.
        wide: build of every combination, which compiles hundreds of programs.
    """

    hyper = ADAM
    recipes: Mapping[str, Recipe] = RECIPES

    def __init__(self, wide: bool = False) -> None:
        self.wide = wide

    def actions(self) -> dict[str, Action]:
        """Every action; a wrapper is built by each recipe of this class."""
        found = super().actions()
        names = (*self.recipes, *(ANY,) * (3 * len(self.recipes) if self.wide else 0))
        build = found["build"]
        found["build"] = replace(build, choices={**build.choices, "recipe": names})
        return found

    @action(seed=SEEDS, groups=(1, 1, 2, 3), recipe=tuple(RECIPES))
    def build(self, cls: Callable[..., object], dtype: str, device: str, **values: Value) -> World:
        """An optimizer of either side around one of the same side.

        Some parameters are frozen; half of the optimizers have experts and replicas, too.
        """
        seed = int(values["seed"])
        dice = Dice(seed)
        recipe = recipe_named(str(values["recipe"]), seed, self.recipes)
        groups: list[Group] = []
        for number in range(int(values["groups"])):
            params = parameters(dice, dtype, device, seed + number, together=False)
            groups.append({"params": params, **self.inside_hyper(dice, recipe)})
        params = [param for group in groups for param in cast(list[Parameter], group["params"])]
        for param in params:
            param.requires_grad = dice.pick((True, True, True, True, False))
        if dice.pick((False, True)):
            for param in params:
                mark(param, dice.pick(MARKS))
        world = World(
            cls=cls,
            options=self.drawn_options(dice, recipe),
            params=params,
            optimizer=None,
            device=torch.device(device),
            more={"dtype": dtype, "recipe": {"name": str(values["recipe"]), "seed": seed}},
        )
        world.optimizer = self.made(world, groups)
        return world

    def recipe_of(self, world: World) -> tuple[Recipe, int]:
        """The recipe that a world was built by, and its seed."""
        kept = cast(Mapping[str, Value], world.more["recipe"])
        seed = int(kept["seed"])
        return recipe_named(str(kept["name"]), seed, self.recipes), seed

    def inside_hyper(self, dice: Dice, recipe: Recipe) -> Group:
        """Hyper-parameters of a group of the inner optimizer."""
        drawn = {**self.drawn_hyper(dice), "bias_correction": recipe.bias_correction}
        if recipe.inside == "sgd":
            return {"lr": drawn["lr"], "weight_decay": abs(cast(float, drawn["weight_decay"]))}
        if recipe.lamb:
            limits = (0.7, 0.0, 0.01) if recipe.inside == "clipping lamb" else (0.0, -1.0)
            return {**drawn, "max_grad_norm": dice.pick(limits), "max_coeff": dice.pick((7.3, 0.9))}
        return drawn

    def drawn_options(self, dice: Dice, recipe: Recipe) -> dict[str, object]:
        """Arguments of the constructor that both sides take unchanged."""
        return {
            "clip_grad": dice.pick((0.7, 0.0, 0.01, 50.0)),
            "norm_type": recipe.norm,
            "verbose": dice.pick((False, True)),
            "low_precision_dtype": dice.pick((torch.float16, torch.bfloat16)),
            "compat": dict(recipe.policies),
        }

    def made(self, world: World, groups: list[Group]) -> object:
        """The optimizer that a world's recipe stands for, of the side that its class is on."""
        recipe, seed = self.recipe_of(world)
        side, dice = side_of(world.cls), Dice(seed)
        compat = import_module("twinstep.contract.compat").Compat
        policies = cast(dict[str, bool], world.options["compat"])
        options = {**world.options, "compat": compat(**policies)}
        return world.cls(
            self.inside(side, recipe.inside, groups, dice),
            **self.scaling(side, recipe, dice),
            **options,
        )

    def inside(self, side: str, inside: str, groups: list[Group], dice: Dice) -> object:
        """The optimizer inside."""
        if inside == "sgd":
            return torch.optim.SGD(groups, momentum=dice.pick((0.9, 0.0)), foreach=False)
        if "lamb" in inside:
            lamb = import_module(f"{optimizers_of(side)}.fused_lamb").FusedLamb
            return lamb(groups, eps_inside_sqrt=dice.pick((False, True)))
        return import_module(f"{optimizers_of(side)}.fused_adam").FusedAdam(
            groups, adam_w_mode=inside == "adamw"
        )

    def scaling(self, side: str, recipe: Recipe, dice: Dice) -> Group:
        """Arguments that decide on the scale; windows are short, so that it moves."""
        scales, scalers = recipe.scales, import_module(f"{optimizers_of(side)}.scalers")
        window, first = dice.pick((1, 2, 3)), dice.pick((8.0, 2.0**16, 3.7, 1.0))
        if scales == "none":
            return {"static_loss_scale": first}
        if scales == "static":
            return {"loss_scale_config": scalers.StaticLossScale(scale=first)}
        if scales == "arguments":
            given = {
                "init_scale": first,
                "scale_window": window,
                "min_scale": dice.pick((1.0, 3.0)),
            }
            return {"dynamic_loss_scale": True, "dynamic_loss_args": dice.pick((given, None))}
        scaler = scalers.DynamicLossScale(
            rule=scales,
            init_scale=first,
            scale_factor=dice.pick((2.0, 1.7)),
            scale_window=window,
            min_scale=dice.pick((1.0, 3.0)),
            delayed_shift=dice.pick((2, 1)),
            consecutive_hysteresis=recipe.consecutive,
            # A step cannot raise without waiting for the device: a test of its own.
            raise_error_at_min_scale=False,
        )
        return {"loss_scale_config": scaler}

    def apply(self, world: World, act: Act) -> object:
        """Carry out an action, and read what the last step left behind."""
        try:
            return super().apply(world, act)
        finally:
            optimizer = scaled(world)
            world.more["readings"] = {
                "overflow": optimizer.overflow,
                "norm": optimizer.get_global_norm(),
                "scale": optimizer.loss_scale,
                "scaler": optimizer.loss_scaler.state_dict(),
            }

    @action(often=7, drives=("backward",), seed=SEEDS, size=(1.0, 1.0, 1e-3, 1e4, 1e30))
    def backward(self, world: World, seed: int, size: float = 1.0) -> None:
        """Gradients of a scaled loss, on top of those that are there; a large one overflows."""
        loss = torch.zeros((), device=world.device)
        for index, param in enumerate(world.params):
            shape = tuple(param.shape)
            weight = filled(shape, torch.float32, "ordinary", seed + index if seed else 0)
            loss = loss + (param.float() * weight.to(world.device)).sum()
        if not loss.requires_grad:
            return
        with warnings.catch_warnings():
            # torch remarks on gradients that are laid out otherwise than their parameter.
            warnings.simplefilter("ignore", UserWarning)
            scaled(world).backward(loss * size, False, False)

    @action(often=2, drives=("set_lr", "get_lr"), lr=(0.013, 0.5, 0.0))
    def change_lr(self, world: World, lr: float) -> object:
        """Set one learning rate for all groups."""
        scaled(world).set_lr(lr)
        return scaled(world).get_lr()

    @action(often=2, drives=("override_loss_scale",), scale=(64.0, 1.0, 3.7, 0.0))
    def override(self, world: World, scale: float) -> None:
        """Put an external scale in force; 0 ends it."""
        scaled(world).override_loss_scale(scale or None)

    @action(drives=("loss_scale",), scale=(32.0, 2.0**24, -1.0))
    def assign_scale(self, world: World, scale: float) -> None:
        """Assign the scaler's scale."""
        scaled(world).loss_scale = scale

    @action(often=2, drives=("refresh_fp32_params",), seed=SEEDS)
    def load_weights(self, world: World, seed: int) -> None:
        """Load other model weights, and refresh the masters."""
        with torch.no_grad():
            for index, param in enumerate(world.params):
                values = filled(tuple(param.shape), param.dtype, "ordinary", seed + index)
                param.copy_(values.to(world.device))
        scaled(world).refresh_fp32_params()

    @action(drives=("initialize_optimizer_states",))
    def initialize_states(self, world: World) -> None:
        """Make the state of the inner optimizer."""
        scaled(world).initialize_optimizer_states()

    @action(drives=("get_global_norm",))
    def norm(self, world: World) -> object:
        """Ask for the norm of the last step."""
        return scaled(world).get_global_norm()

    @action(drives=("memory_report",))
    def report(self, world: World) -> object:
        """Bytes by kind."""
        return scaled(world).memory_report()

    @action(limit=(0.5, 0.0, 1e-3))
    def set_clip(self, world: World, limit: float) -> None:
        """Assign the largest norm."""
        scaled(world).clip_grad = limit

    @action(drives=("load_state_dict",))
    def load_weights_alone(self, world: World) -> None:
        """Load what was saved, but not the state of the inner optimizer."""
        if world.saved is None:
            self.save(world)
        scaled(world).load_state_dict(self._read(world), load_optimizer_states=False)

    @action(often=2, drives=("load_state_dict",), seed=SEEDS)
    def resume(self, world: World, seed: int) -> None:
        """Save now; load into a new instance over copies of the parameters, other defaults."""
        self.save(world)
        dice = Dice(seed)
        recipe, _ = self.recipe_of(world)
        sizes = [len(group) for group in _groups_of(world)]
        trained = [param for param in world.params if param.requires_grad]
        frozen = [param for param in world.params if not param.requires_grad]
        copies = [like(param) for param in trained]
        for copied, param in zip(copies, trained, strict=True):
            mark(copied, vars(param))
        at = 0
        groups: list[Group] = []
        for size in sizes:
            hyper = self.inside_hyper(dice, recipe)
            groups.append({"params": copies[at : at + size], **hyper})
            at += size
        # Frozen ones may be all that there is, and some group must hold them.
        groups[-1]["params"] = [*cast(list[Parameter], groups[-1]["params"]), *frozen]
        world.params, world.scheduler = [*copies, *frozen], None
        world.optimizer = self.made(world, groups)
        world.torch_optimizer.load_state_dict(self._read(world))

    def copy(self, world: World, how: str) -> None:
        """No action: a wrapper's copy would not hold the inner optimizer, on either side."""

    @action(drives=("add_param_group",))
    def add_group(self, world: World, seed: int = 0) -> None:
        """Try to add a group, which masters that are laid out do not allow."""
        del seed
        extra = Parameter(torch.ones(2, device=world.device))
        world.torch_optimizer.add_param_group({"params": [extra]})


def mark(param: Parameter, attributes: Mapping[str, object]) -> None:
    """Say that a parameter is an expert's, or a replica whose gradient does not count."""
    for name, value in attributes.items():
        setattr(param, name, value)


def _groups_of(world: World) -> list[list[Tensor]]:
    return cast("list[list[Tensor]]", getattr(world.optimizer, "fp16_groups"))  # noqa: B009
