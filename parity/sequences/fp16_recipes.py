"""Parts of an FP16 wrapper: the inner optimizer, the scale's rule, the norm, the policies.

A recipe fixes what kernels are compiled for. A few of them, instead of every choice on its own,
keep the programs of hundreds of sequences down to some dozens; every value is in one recipe or
more, and every rule of the scale meets Adam and LAMB. `ANY` draws each choice freely.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from twinstep.parity.sequences.fills import Dice

INSIDE = ("adamw", "adam", "lamb", "clipping lamb", "sgd")
SCALES = ("dynamic", "wrapper", "torch", "static", "arguments", "none")
NORMS = (2.0, 1.0, float("inf"), 3.0)
LATE = {"unscale_with_updated_scale": True}
EAGER = {"step_at_construction": True}
STAYS = {"external_scale_stays": True}
ANY = "any"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One way to build a wrapper.

    Attributes:
        inside: inner optimizer, one of INSIDE.
        scales: where the scale comes from, one of SCALES.
        norm: order of the norm that clips.
        policies: fields of `Compat` that differ from the default.
        consecutive: consecutive hysteresis of the dynamic rule.
        bias_correction: of every group to begin with.
    """

    inside: str = "adamw"
    scales: str = "dynamic"
    norm: float = 2.0
    policies: Mapping[str, bool] = field(default_factory=dict)
    consecutive: bool = False
    bias_correction: bool = True

    @property
    def lamb(self) -> bool:
        """True if the inner optimizer is LAMB."""
        return "lamb" in self.inside


RECIPES: Mapping[str, Recipe] = {
    "adamw, dynamic": Recipe(),
    "adam, dynamic, largest": Recipe(
        inside="adam", norm=float("inf"), policies=LATE, consecutive=True
    ),
    "adamw, wrapper": Recipe(scales="wrapper", bias_correction=False),
    "adam, torch, sum": Recipe(inside="adam", scales="torch", norm=1.0, policies=STAYS),
    "adamw, static, cubes": Recipe(scales="static", norm=3.0, policies=EAGER),
    "adam, arguments": Recipe(inside="adam", scales="arguments", policies=STAYS),
    "adamw, none": Recipe(scales="none", policies=LATE),
    "lamb, wrapper": Recipe(inside="lamb", scales="wrapper", policies=LATE),
    "lamb, torch, largest": Recipe(inside="lamb", scales="torch", norm=float("inf")),
    "clipping lamb, dynamic, sum": Recipe(
        inside="clipping lamb", norm=1.0, policies=STAYS, bias_correction=False
    ),
    "clipping lamb, static, cubes": Recipe(inside="clipping lamb", scales="static", norm=3.0),
    "lamb, arguments": Recipe(inside="lamb", scales="arguments", policies=EAGER),
    "sgd, dynamic": Recipe(inside="sgd", policies=LATE),
    "sgd, none, sum": Recipe(inside="sgd", scales="none", norm=1.0),
}


def recipe_named(name: str, seed: int, recipes: Mapping[str, Recipe]) -> Recipe:
    """The recipe of that name; ANY draws one by the seed, with policies of the others."""
    if name != ANY:
        return recipes[name]
    dice = Dice(seed)
    return Recipe(
        inside=dice.pick(INSIDE),
        scales=dice.pick(SCALES),
        norm=dice.pick(NORMS),
        policies=dice.pick([recipe.policies for recipe in recipes.values()]),
        consecutive=dice.pick((False, True)),
        bias_correction=dice.pick((True, False)),
    )
