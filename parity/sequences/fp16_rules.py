"""Actions on an optimizer with the interface of `FP16Optimizer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import cast

import torch
from torch import Tensor
from torch.nn import Parameter

from twinstep.parity.sequences.actions import Action, action
from twinstep.parity.sequences.damage import inside_of
from twinstep.parity.sequences.fills import DTYPES, INF, NAN, Dice, filled
from twinstep.parity.sequences.fp16_by_hand import ScaledByHand
from twinstep.parity.sequences.fp16_motifs import MOTIFS, SIZES
from twinstep.parity.sequences.fp16_parts import REFUSED, Scaled, Timers
from twinstep.parity.sequences.fp16_recipes import ANY, RECIPES, Recipe, recipe_named
from twinstep.parity.sequences.motifs import STEPS
from twinstep.parity.sequences.parts import (
    EXTENTS,
    GRAPHS,
    GROUPS,
    RANKS,
    SEEDS,
    add_to,
    backward_twice,
    curved,
    left_out,
    like,
    optimizers_of,
    parameters,
    side_of,
    train,
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


def scaled(world: World) -> Scaled:
    """The optimizer, typed."""
    return cast(Scaled, world.optimizer)


class FP16Rules(ScaledByHand):
    """Loss scaling, masters and everything around them, over several optimizers inside.

    After every action the scalars of the last step are read and compared with everything else.

    Attributes:
        recipes: ways to build a wrapper, by name.
        wide: build of every combination, which compiles hundreds of programs.
        own: arguments of the constructor that the other wrapper does not have.
    """

    hyper, cpu_offload = ADAM, True
    recipes: Mapping[str, Recipe] = RECIPES
    passed: Sequence[str] = (
        *("init_optimizer", "loss_scale_config", "low_precision_dtype", "static_loss_scale"),
        *("dynamic_loss_scale", "dynamic_loss_args", "verbose", "clip_grad", "norm_type", "compat"),
    )
    exempt = {
        **ScaledByHand.exempt,
        **dict.fromkeys(("mpu", "deepspeed", "expert_groups", "expert_data_groups"), RANKS),
    }
    own: Mapping[str, Sequence[object]] = {
        "has_moe_layers": (False, True),
        "initial_dynamic_scale": (2.0**32, 64.0),
        "timers": (False, True),
    }
    sparse = True
    refused = {**REFUSED, "fused_adam_legacy": (True,)}
    lasting = (
        *("train",) * STEPS,
        *("set_hyper", ("lower_rate", {"bits": 4}), "train") * 3,
        *("hold_rates", ("lower_rate", {"bits": 4}), "train"),
    )
    tensor_hyper = True
    motifs = MOTIFS

    def __init__(self, wide: bool = False) -> None:
        self.wide = wide

    def actions(self) -> dict[str, Action]:
        """Every action; a wrapper is built by each recipe of this class."""
        found = super().actions()
        names = (*self.recipes, *(ANY,) * (3 * len(self.recipes) if self.wide else 0))
        build = found["build"]
        found["build"] = replace(build, choices={**build.choices, "recipe": names})
        return found

    @action(
        seed=SEEDS,
        groups=GROUPS,
        recipe=tuple(RECIPES),
        alike=(False, False, True),
        omitted=(False, False, True),
        extent=EXTENTS,
    )
    def build(self, cls: Callable[..., object], dtype: str, device: str, **values: Value) -> World:
        """An optimizer of either side around one of the same side.

        Some parameters are frozen; half of the optimizers have experts and replicas, too. With
        `alike` groups have the same hyper-parameters; with `omitted` some arguments are left to
        their defaults.
        """
        seed = int(values["seed"])
        dice = Dice(seed)
        recipe = recipe_named(str(values["recipe"]), seed, self.recipes)
        groups: list[Group] = []
        for number in range(int(values["groups"])):
            extent = str(values["extent"]) * (not number)
            params = parameters(dice, dtype, device, seed + number, False, extent)
            hyper = self.inside_hyper(Dice(seed) if values["alike"] else dice, recipe)
            groups.append({"params": params, **hyper})
        params = [param for group in groups for param in cast(list[Parameter], group["params"])]
        for param in params:
            param.requires_grad = dice.pick((True, True, True, True, False))
        if dice.pick((False, True)):
            for param in params:
                mark(param, dice.pick(MARKS))
        options = self.drawn_options(dice, recipe)
        world = World(
            cls=cls,
            options=left_out(dice, options) if values["omitted"] else options,
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

    def arguments(self) -> set[str]:
        """Arguments of the reference's constructor that some action passes."""
        return {*self.passed, *self.own, *self.refused}

    def drawn_options(self, dice: Dice, recipe: Recipe) -> dict[str, object]:
        """Arguments of the constructor that both sides take unchanged."""
        lows: Sequence[torch.dtype] = (torch.float16, torch.bfloat16)
        if recipe.scales == "none":
            # Without a rule of its own, bf16 is what does not scale.
            lows = (torch.bfloat16, torch.bfloat16, torch.float16)
        return {
            "clip_grad": dice.pick((0.7, 0.0, 0.01, 50.0, -1.0)),
            "norm_type": recipe.norm,
            "verbose": dice.pick((False, True)),
            "low_precision_dtype": dice.pick(lows),
            "compat": dict(recipe.policies),
            **{name: dice.pick(row) for name, row in self.own.items()},
        }

    def made(self, world: World, groups: list[Group]) -> object:
        """The optimizer that a world's recipe stands for, of the side that its class is on."""
        world.more.setdefault("trained", [param.requires_grad for param in world.params])
        recipe, seed = self.recipe_of(world)
        side, dice = side_of(world.cls), Dice(seed)
        compat = import_module("twinstep.contract.compat").Compat
        options = dict(world.options)
        if options.pop("timers", False):
            options["timers"] = Timers(world.events)
        if "compat" in options:
            options["compat"] = compat(**cast(dict[str, bool], options["compat"]))
        inside = self.inside(side, recipe.inside, groups, dice)
        scaling = self.scaling(side, recipe, dice)
        # The dict stays the caller's.
        world.more["scaling"] = scaling.get("dynamic_loss_args")
        return world.cls(inside, **scaling, **options)

    def construct(self, world: World, wrong: Mapping[str, object]) -> None:
        """Construct another one over copies of the parameters."""
        params = [like(param) for param in world.params]
        inside = self.inside(side_of(world.cls), "adamw", [{"params": params}], Dice(0))
        world.cls(inside, **{"dynamic_loss_scale": "dynamic_loss_args" in wrong, **wrong})

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
        window, first = dice.pick((1, 2, 3, 1000)), dice.pick((8.0, 2.0**16, 3.7, 1.0))
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

    @action(
        often=7,
        drives=("backward",),
        seed=SEEDS,
        size=SIZES,
        loss=("fp32", "fp32", "fp16", "bf16", "one element"),
        graph=GRAPHS,
    )
    def backward(  # type: ignore[override]
        self, world: World, seed: int, size: float, loss: str, graph: str
    ) -> None:
        """Gradients of a scaled loss, on top of those that are there; a large one overflows.

        An infinite one does so in one parameter alone, for most seeds, and is a NaN for some.
        """
        add_to(world.params)
        total = torch.zeros((), device=world.device)
        alone = size == INF and seed % 4 > 0
        hit, hits = (NAN if seed % 4 == 1 else INF) if alone else 1.0, world.hits(seed)
        for index, param in enumerate(world.params):
            shape = tuple(param.shape)
            weight = filled(shape, torch.float32, "ordinary", world.seed_of(index, seed))
            share = curved(param.float() * weight.to(world.device), graph).sum()
            total = total + (share * hit if index in hits else share)
        total = total if alone else total * size
        total = total.reshape(1) if loss == "one element" else total.to(DTYPES[loss])
        backward_twice(scaled(world).backward, total, graph)

    @action(often=9, drives=("backward", "step"), seed=SEEDS, size=SIZES)
    def train(self, world: World, seed: int, size: float) -> object:  # type: ignore[override]
        """Gradients of a scaled loss, then one update."""
        self.backward(world, seed, size, "fp32", "")
        return self.step(world)

    @action(often=2, drives=("set_lr", "get_lr"), lr=(0.013, 0.0130001, 0.5, 0.0, 3e-9))
    def change_lr(self, world: World, lr: float) -> object:
        """Set one learning rate for all groups."""
        scaled(world).set_lr(lr)
        return scaled(world).get_lr()

    @action(often=2, drives=("override_loss_scale",), scale=(64.0, 1.0, 0.37, 0.0, -1.0, INF, NAN))
    def override(self, world: World, scale: float) -> None:
        """Put an external scale in force; 0 ends it."""
        scaled(world).override_loss_scale(scale or None)

    @action(drives=("loss_scale",), scale=(32.0, 2.0**24, 2.0**41, 2.0**100, -1.0, INF, NAN))
    def assign_scale(self, world: World, scale: float) -> None:
        """Assign the scaler's scale."""
        scaled(world).loss_scale = scale

    @action(often=2, drives=("refresh_fp32_params",), seed=SEEDS)
    def load_weights(self, world: World, seed: int) -> None:
        """Load other model weights, for odd seeds in part, and refresh the masters."""
        for index, param in enumerate(world.params):
            if seed % 2 and not index % 2:
                continue
            own = world.seed_of(index, seed, gradient=False)
            values = filled(tuple(param.shape), param.dtype, "ordinary", own)
            # So that no version counter tells of it.
            param.data.copy_(values.to(world.device))
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

    @action(limit=(0.5, 0.0, 1e-3, -1.0, INF))
    def set_clip(self, world: World, limit: float) -> None:
        """Assign the largest norm."""
        scaled(world).clip_grad = limit

    @action(drives=("load_state_dict",), inside=("as saved", "of another", "none"))
    def load_weights_alone(self, world: World, inside: str) -> None:
        """Load what was saved, but not the state of the inner optimizer, whatever that is."""
        if world.saved is None:
            self.save(world)
        with world.lent(inside_of(self._read(world), inside)) as state:
            scaled(world).load_state_dict(state, load_optimizer_states=False)

    @action(often=2, drives=("load_state_dict",), seed=SEEDS)
    def resume(self, world: World, seed: int) -> None:
        """Save now; load into a new instance over copies of the parameters, other defaults."""
        self.save(world)
        dice = Dice(seed)
        recipe, _ = self.recipe_of(world)
        sizes = [len(group) for group in _groups_of(world)]
        # What was frozen since keeps its place in the masters; some have none without elements.
        held = {id(param) for group in _groups_of(world) for param in group}
        copies = {id(param): like(param) for param in world.params if id(param) in held}
        others = [param for param in world.params if id(param) not in held]
        now = [param.requires_grad for param in world.params]
        groups: list[Group] = []
        left = list(copies.values())
        for size in sizes:
            hyper = self.inside_hyper(dice, recipe)
            groups.append({"params": left[:size], **hyper})
            left = left[size:]
        # The others may be all that there is, and some group must hold them.
        groups[-1]["params"] = [*cast(list[Parameter], groups[-1]["params"]), *others]
        world.params = [copies.get(id(param), param) for param in world.params]
        world.scheduler = None
        train(world.params, cast(list[bool], world.more["trained"]))
        world.optimizer = self.made(world, groups)
        train(world.params, now)
        with world.lent(self._read(world)) as state:
            world.torch_optimizer.load_state_dict(state)

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
