"""The parts of a law."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from twinstep.parity.cases.case import Case, Recipe
from twinstep.parity.cases.covering import small_sizes
from twinstep.parity.laws.plan import Plan
from twinstep.parity.operations.operation import Operation

SEVERAL = (33, 7, 130)
ENGINES = ("cuda", "replay", "cpu", "interpret")


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The cases of the covering that suit a law, and the changes that make others suit.

    Attributes:
        regimes: that suit; others are replaced by these in turn. Empty: every regime suits.
        sizes: `usual` (of the covering), `small` (some dozen elements), `several` (more than one
            tensor, where the layout allows it).
        one_step: all tensors have completed the same number of steps.
    """

    regimes: tuple[str, ...] = ()
    sizes: str = "usual"
    one_step: bool = False

    def suits(self, recipe: Recipe) -> bool:
        """True if a law can take the recipe unchanged."""
        return self.adapted(recipe, 0) is recipe

    def adapted(self, recipe: Recipe, turn: int) -> Recipe:
        """The recipe itself where it suits, otherwise changed where it does not."""
        changed: Recipe = recipe
        if self.regimes and recipe.regime not in self.regimes:
            changed = replace(changed, regime=self.regimes[turn % len(self.regimes)])
        if self.sizes == "small" and recipe.sizes:
            changed = replace(changed, sizes=small_sizes(recipe.layout, str(recipe.seed)))
        if self.sizes == "several" and recipe.layout == "list" and len(recipe.sizes) < 3:
            changed = replace(changed, sizes=(*recipe.sizes, *SEVERAL))
        if self.one_step and not recipe.one_step and len(recipe.sizes) > 1:
            changed = replace(changed, one_step=True)
        return changed

    def of(self, recipes: Sequence[Recipe], count: int) -> list[Recipe]:
        """`count` recipes of the covering: those that suit before those that must be changed."""
        suiting = [recipe for recipe in recipes if self.suits(recipe)]
        others = [recipe for recipe in recipes if not self.suits(recipe)]
        chosen = [*suiting, *others][:count]
        return [self.adapted(recipe, turn) for turn, recipe in enumerate(chosen)]


def as_drawn(case: Case) -> Iterable[Case]:
    """The case itself and no other."""
    return [case]


def everywhere(operation: Operation, combination: str) -> str:
    """The law applies to every dtype combination."""
    return ""


@dataclass(frozen=True, kw_only=True)
class Law:
    """A named property that kernels must have.

    Attributes:
        name: the table's column.
        says: the property in one line.
        share: number of cases relative to `--examples`.
        each_layout: whether that many are taken for each layout.
        draw: which cases of the covering it takes.
        thorough: as many cases again are small, and one has a tensor of 2^18 elements at least.
        vary: the cases that are judged for one drawn case; each can fail and shrink alone.
        plan: calls and checks for one case and the kernel's arithmetic.
        idle: why the law is not judged on a dtype combination; empty where it is.
        claim: what a kernel must claim for the law to apply; empty: it applies to all.
        engines: where the law can be judged.
    """

    name: str
    says: str
    share: float = 1.0
    each_layout: bool = False
    draw: Draw = Draw()
    thorough: bool = False
    vary: Callable[[Case], Iterable[Case]] = as_drawn
    plan: Callable[[Case, str], Plan]
    idle: Callable[[Operation, str], str] = everywhere
    claim: str = ""
    engines: tuple[str, ...] = ENGINES
