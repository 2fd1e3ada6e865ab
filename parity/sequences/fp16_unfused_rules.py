"""Actions on an optimizer with the interface of `FP16UnfusedOptimizer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twinstep.parity.sequences.actions import action
from twinstep.parity.sequences.fp16_motifs import CLEAN, MOTIFS
from twinstep.parity.sequences.fp16_parts import REFUSED
from twinstep.parity.sequences.fp16_recipes import RECIPES, Recipe
from twinstep.parity.sequences.fp16_rules import FP16Rules, Group
from twinstep.parity.sequences.parts import move
from twinstep.parity.sequences.world import World


class FP16UnfusedRules(FP16Rules):
    """The same actions; LAMB may be handed gradients, copies and a divisor."""

    # Reporting the scaled norm, and leaving out experts, are two more things to reproduce.
    recipes = {
        **RECIPES,
        "adamw, dynamic, scaled norm": Recipe(policies={"report_scaled_norm": True}),
        "adamw, dynamic, without experts": Recipe(policies={"clip_without_experts": True}),
    }

    motifs = {
        **MOTIFS,
        "weights moved between steps": (CLEAN, ("move_weights", {"every": True}), CLEAN),
    }
    own: Mapping[str, Sequence[object]] = {"has_moe_layers": (False, True)}
    passed = (*FP16Rules.passed, "fused_lamb_legacy")
    refused = {**REFUSED, "fused_lamb_legacy": (True,)}

    @action(every=(True, False))
    def move_weights(self, world: World, every: bool) -> None:
        """Give parameters other memory, as `module.to` and offloading do; none are in a buffer."""
        move(world.params, every)

    def made(self, world: World, groups: list[Group]) -> object:
        """Around LAMB, hand over or not."""
        recipe, seed = self.recipe_of(world)
        world.options["fused_lamb_legacy"] = recipe.lamb and seed % 2 == 0
        return super().made(world, groups)
