"""Effort of a search, and the recipes of cases that a law takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from twinstep.parity.cases.case import Recipe
from twinstep.parity.cases.covering import (
    LARGE,
    LARGE_WHERE_SLOW,
    NUMEROUS,
    PERIOD,
    WHOLE,
    covering_recipes,
    crowd,
    diminished,
    enlarged,
)
from twinstep.parity.cases.source_sizes import source_sizes
from twinstep.parity.laws import LAWS
from twinstep.parity.laws.base import Law
from twinstep.parity.operations.operation import OptionValue, Range
from twinstep.parity.records.standalone import FOLDER
from twinstep.parity.registry.engines import Engine
from twinstep.parity.registry.kernels import Kernel
from twinstep.parity.runner.calls.invoke import SECONDS

EXAMPLES = 12
SCALAR_CASES = {"value": 20}
# Combinations of a spread run that together see all that a law enumerates.
TURNS = 3
# Triton's interpreter runs one program after another.
SLOW = ("interpret",)
FEW_HUNDRED = Range(low=260, high=300)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Effort of the search.

    Attributes:
        examples: cases drawn for the value law; others draw their share of it.
        seed: of the generator; None draws the same cases in every run.
        call_seconds: limit of one call.
        shrink_seconds: limit of shrinking one failure.
        repros: folder for repro files; None writes none.
        spread: dtype combinations share one long covering, of which each sees a part; in turn they
            see the thirds of the sizes and values that laws enumerate.
    """

    examples: int = EXAMPLES
    seed: int | None = None
    call_seconds: float = SECONDS
    shrink_seconds: float = 4.0
    repros: str | None = FOLDER
    spread: bool = False

    def cases(self, law: Law, kernel: Kernel) -> int:
        """Number of recipes to draw for a law."""
        if not kernel.operation.lists:
            return max(1, round(self.examples * law.share * SCALAR_CASES.get(law.name, 8)))
        # A whole step has the decisions of several operations in it; these laws show them.
        several = 2 if law.share >= 1 and len(kernel.operation.options) > 2 else 1
        return max(1, round(self.examples * law.share * several))

    def longest(self, kernel: Kernel) -> int:
        """Recipes in the covering that all laws of a row take theirs from."""
        laws = [LAWS[name] for name in kernel.operation.laws]
        return max(self.cases(law, kernel) * (1 + law.thorough) for law in laws)


def turn_of(kernel: Kernel, dtype: str) -> int:
    """The third of what a law enumerates that is this combination's."""
    return tuple(kernel.operation.combinations).index(dtype) % TURNS


def _covering(kernel: Kernel, dtype: str, effort: Effort) -> list[Recipe]:
    """The covering of the row."""
    least = 0 if effort.spread else EXAMPLES
    length = max(effort.longest(kernel), least)
    return covering_recipes(
        kernel.operation, dtype, kernel.layouts, length, effort.seed, shared=effort.spread
    )


def _small_and_large(
    kernel: Kernel, dtype: str, effort: Effort, engine: Engine
) -> Iterator[Recipe]:
    """The second half of the covering, made small; recipes made large, and long."""
    if not kernel.operation.lists:
        return
    first, *_ = recipes = _covering(kernel, dtype, effort)
    for number, recipe in enumerate(recipes[len(recipes) // 2 :]):
        yield diminished(recipe, number)
    if engine.name not in SLOW:
        turn = min(kernel.dtypes.index(dtype), len(LARGE) - 1)
        quick = engine.name in ("cpu", "cuda")
        sizes, beside = (LARGE[turn], (WHOLE,)) if quick else (LARGE_WHERE_SLOW, ())
        # A grid of as many programs as processors may have room for 8 blocks of 1,024 in each.
        sizes = sizes if turn else LARGE[0]
        # A sum in two stages may have room for 1,024 tensors, or for as many blocks of 1,024.
        past = not quick and not turn and "norm" in kernel.operation.writes
        large = enlarged(kernel.operation, first, sizes, beside, turn)
        yield large
        if quick and "found_inf" in kernel.operation.writes:
            yield replace(large, regime="planted")
        if (quick or past) and "list" in kernel.layouts:
            yield crowd(kernel.operation, recipes[-1], NUMEROUS[turn])


def _recipes_by_source(
    kernel: Kernel, dtype: str, effort: Effort, engine: Engine
) -> Iterator[Recipe]:
    """One list, or some calls, with tensors one longer than blocks in the kernel's source."""
    quick = engine.name in ("cpu", "cuda")
    if not kernel.operation.lists or not (quick or dtype == kernel.dtypes[0]):
        return
    file = Path(kernel.source or kernel.place.rpartition(":")[0])
    sizes = source_sizes(file, 1 << 19 if quick else 1 << 16)
    recipe = replace(_covering(kernel, dtype, effort)[0], regime="ordinary", period=PERIOD)
    if sizes and "list" in kernel.layouts:
        yield replace(recipe, layout="list", sizes=sizes)
    else:
        yield from (replace(recipe, sizes=(size,)) for size in sizes[-8:])


def _customary(kernel: Kernel, dtype: str, effort: Effort, engine: Engine) -> Iterator[Recipe]:
    """Small recipes for all settings that belong together: what is done in place may need them."""
    operation, recipes = kernel.operation, _covering(kernel, dtype, effort)
    for number, given in enumerate(operation.together if operation.lists else ()):
        settings = {"found_inf": 0.0, **given}
        recipe = diminished(recipes[number % len(recipes)], number)
        own = [{row.name for row in rows} for rows in (operation.controls, operation.options)]
        controls, options = ({n: v for n, v in settings.items() if n in names} for names in own)
        yield replace(
            recipe,
            absent=False,
            controls={**recipe.controls, **cast("Mapping[str, float]", controls)},
            options={**recipe.options, **cast("Mapping[str, OptionValue]", options)},
        )


def _crowded(kernel: Kernel, dtype: str, effort: Effort, engine: Engine) -> Iterator[Recipe]:
    """A long list, where that is quick: some kernels do otherwise with one."""
    quick = engine.name in ("cpu", "cuda")
    if quick and "list" in kernel.layouts and kernel.operation.lists:
        yield crowd(kernel.operation, _covering(kernel, dtype, effort)[-1], FEW_HUNDRED)


def recipes_of(kernel: Kernel, dtype: str, law: Law, effort: Effort) -> list[Recipe]:
    """Recipes that the law takes from the covering of the row."""
    count = effort.cases(law, kernel)
    recipes = _covering(kernel, dtype, effort)
    if not (law.each_layout and kernel.operation.lists):
        return law.draw.of(recipes, count)
    groups = [[recipe for recipe in recipes if recipe.layout == name] for name in kernel.layouts]
    return [recipe for group in groups for recipe in law.draw.of(group, count)]


def more_recipes(
    kernel: Kernel, dtype: str, law: Law, effort: Effort, engine: Engine
) -> Iterator[Recipe]:
    """Recipes that the law takes besides."""
    if law.thorough:
        yield from _small_and_large(kernel, dtype, effort, engine)
    elif law.name in MORE:
        yield from MORE[law.name](kernel, dtype, effort, engine)


MORE = {
    "boundary_sizes": _recipes_by_source,
    "nothing_else_written": _customary,
    "process_state": _crowded,
}
