"""Actions on FP16 wrappers over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import torch
from torch.nn import Parameter

from twinstep.parity.sequences.actions import Action, Motif, action
from twinstep.parity.sequences.fills import INF, Dice
from twinstep.parity.sequences.fp16_recipes import RECIPES, recipe_named
from twinstep.parity.sequences.fp16_rules import FP16Rules
from twinstep.parity.sequences.over_ranks.model import (
    GIVEN,
    group_arguments,
    has_experts,
    names_of_experts,
    parameters_over,
)
from twinstep.parity.sequences.over_ranks.place import DrawnRank
from twinstep.parity.sequences.over_ranks.rules import DRAWN, OverRanks
from twinstep.parity.sequences.parts import SEEDS, Group, like, side_of
from twinstep.parity.sequences.world import Value, World

# Engines, by whether they reduce gradients in backward.
ENGINES = {"none": None, "reduces": True, "leaves": False}
GROUPS = ("mpu", "deepspeed", "expert_groups", "expert_data_groups")
OVERFLOW, CLEAN = ("train", {"size": INF}), ("train", {"size": 1.0})
CLIPS = ("set_clip", {"limit": 1e-3})
MOTIFS: Mapping[str, Motif] = {
    **{
        f"overflows over {ranks}": (("build", {"ranks": ranks}), *(OVERFLOW, CLEAN) * 4)
        for ranks in ("tensor 2", "expert 2", "data 2", "data 2, expert 2", "data 2, tensor 2")
    },
    **{
        f"a norm over {ranks}": (("build", {"ranks": ranks}), CLIPS, CLEAN, CLEAN)
        for ranks in ("tensor 2", "expert 2", "tensor 3", "data 2, expert 2", "expert 2, tensor 2")
    },
    **{
        f"a checkpoint over {ranks}": (
            *(("build", {"ranks": ranks}), CLEAN, OVERFLOW, CLEAN),
            *("save", OVERFLOW, CLEAN, "load", CLEAN, "resume", CLEAN),
        )
        for ranks in ("data 2", "expert 2", "data 2, expert 2", "tensor 2")
    },
    **{
        f"overflows over {ranks}, {given}": (
            *(("build", {"ranks": ranks, "given": given, "engine": "none"}),),
            *(OVERFLOW, OVERFLOW, CLEAN, OVERFLOW),
        )
        for ranks, given in (
            *(("data 2", "copies"), ("data 3", "copies")),
            *(("data 2", "experts"), ("expert 2", "experts")),
        )
    },
    "overflows that an engine leaves": (
        ("build", {"ranks": "data 3", "given": "", "engine": "leaves"}),
        *(OVERFLOW, CLEAN) * 2,
    ),
    "experts without tokens": (
        ("build", {"ranks": "expert 2"}),
        *(("backward", {"size": 1.0}), "forget", "step") * 2,
    ),
    "one rank is refused, and an engine leaves all to them": (
        ("build", {"ranks": "data 2", "given": "", "engine": "leaves"}),
        *(("construct_wrongly", {"on": 1}), CLEAN, ("load_damaged", {"on": 0}), CLEAN),
    ),
    "one rank is refused": ("construct_wrongly", CLEAN, "load_damaged", CLEAN, "load_damaged"),
}


class FP16OverRanks(OverRanks, FP16Rules):
    """The same actions on all ranks, with gradients that have been added up over copies."""

    motifs, lasting = MOTIFS, ()

    def actions(self) -> dict[str, Action]:
        """Every action; LAMB over flat buffers would have a trust ratio of what a rank holds."""
        found, build = super().actions(), super().actions()["build"]
        flat = "fused_lamb_legacy" not in self.passed
        names = [name for name in self.recipes if not (flat and self.recipes[name].lamb)]
        found["build"] = replace(build, choices={**build.choices, "recipe": tuple(names)})
        return found

    @action(
        seed=SEEDS,
        groups=(1, 1, 2, 3),
        recipe=tuple(RECIPES),
        given=GIVEN,
        engine=tuple(ENGINES),
        **DRAWN,
    )
    def build(  # type: ignore[override]
        self, cls: Callable[..., object], dtype: str, device: str, rank: DrawnRank, **values: Value
    ) -> World:
        """An optimizer on each rank, with the groups that its parameters need."""
        seed = int(values["seed"])
        dice = Dice(seed)
        recipe = recipe_named(str(values["recipe"]), seed, self.recipes)
        given = str(values["given"])
        experts = has_experts(rank, given)
        names = ("", "", *names_of_experts(rank)) if experts else ("",)
        groups: list[Group] = []
        for number in range(int(values["groups"])):
            params = parameters_over(dice, dtype, device, seed + 10 * number, rank, names)
            groups.append({"params": params, **self.inside_hyper(dice, recipe)})
        params = [param for group in groups for param in cast(list[Parameter], group["params"])]
        for param in params[1:]:
            param.requires_grad = dice.pick((True, True, True, True, False))
        engine = ENGINES[str(values["engine"])]
        options = self.drawn_options(dice, recipe)
        options |= group_arguments(dice, rank, given)
        if engine is not None:
            options["deepspeed"] = SimpleNamespace(enable_backward_allreduce=engine)
        # Only where all ranks are asked may one alone have an overflow.
        rank.alone = experts or engine is False
        world = World(
            cls=cls,
            options=options,
            params=params,
            optimizer=None,
            device=torch.device(device),
            more={"dtype": dtype, "recipe": {"name": str(values["recipe"]), "seed": seed}},
            rank=rank,
        )
        world.optimizer = self.made(world, groups)
        return world

    def construct(self, world: World, wrong: Mapping[str, object]) -> None:
        """Construct another one over copies of the parameters, with the same groups."""
        params = [like(param) for param in world.params]
        inside = self.inside(side_of(world.cls), "adamw", [{"params": params}], Dice(0))
        given = {name: world.options[name] for name in GROUPS if name in world.options}
        dynamic = {"dynamic_loss_scale": "dynamic_loss_args" in wrong}
        world.cls(inside, **{**dynamic, **given, **wrong})
