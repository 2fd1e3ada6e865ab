"""What can be done to an optimizer with the interface of `FP16UnfusedOptimizer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from parity.twins.fills import Dice
from parity.twins.fp16_rules import COMPATS, FP16Rules, Group
from parity.twins.world import Value, World


class FP16UnfusedRules(FP16Rules):
    """The same actions; LAMB may be handed gradients, copies and a divisor."""

    def drawn_options(self, dice: Dice) -> dict[str, object]:
        """Reporting the scaled norm is one more thing to reproduce."""
        fields = dice.pick((*COMPATS, {"report_scaled_norm": True}))
        return {**super().drawn_options(dice), "compat": fields}

    def made(self, world: World, groups: list[Group]) -> object:
        """Around LAMB, hand over or not."""
        recipe = cast(Mapping[str, Value], world.more["recipe"])
        legacy = "lamb" in str(recipe["inside"]) and int(recipe["seed"]) % 2 == 0
        world.options["fused_lamb_legacy"] = legacy
        return super().made(world, groups)
