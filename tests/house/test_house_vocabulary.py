"""One vocabulary: classes of the same name say the same words on both sides.

Modules of the same name (`reference/optimizers/scalers.py`, `fast/scalers.py`) are compared class
by class: public methods, properties and attributes, inherited ones of ours included.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from itertools import product

from tools.source import python_files

MUTABLE = "the fast side moves its state in place on the device; the reference makes a new record"
BLOCK = "numbers reach a captured graph through a control block, which only the fast side has"
# Class → word that one side alone has → why. Subclasses inherit the excuse.
ONE_SIDED = {
    "LossScale": {
        "after": MUTABLE,
        "state": MUTABLE,
        "rule": "a pure function here; there a kernel, chosen by `scaling`",
        "scaling": "names the kernel's rule and its constants",
        "compat": "read when the kernel of a whole step is chosen; the reference's rule has it",
        "enter": MUTABLE,
        "on": "where the state lives; the reference has no device of its own",
        "raise_if_exhausted": "the error waits for the device; the reference raises at once",
    },
    "ScaledWrapper": {"sync_hyperparameters": BLOCK},
    "FlatGroup": {
        "slices": "views of masters, made when asked for",
        "pieces": "the same views, made once at construction",
        "publish": "a kernel of the step or a copy; the reference copies in its step",
        "refresh": "masters from the model weights, in place",
    },
}


def modules(side: str) -> dict[str, list[str]]:
    """Import names of one side's modules by their last name."""
    found = defaultdict(list)
    for path in python_files(side):
        if path.stem != "__init__":
            found[path.stem].append(".".join(("twinstep", *path.with_suffix("").parts)))
    return found


def classes(module: str) -> dict[str, type]:
    """Public classes that a module defines."""
    members = vars(importlib.import_module(module)).items()
    own = {name: kind for name, kind in members if inspect.isclass(kind) and name[0] != "_"}
    return {name: kind for name, kind in own.items() if kind.__module__ == module}


def words(kind: type) -> set[str]:
    """Public names of a class: in its body, annotated, or assigned to self; not those of torch."""
    found: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.startswith(("twinstep.", __name__)):
            found |= vars(base).keys() | base.__annotations__.keys()
            found |= set(_assigned(ast.parse(textwrap.dedent(inspect.getsource(base)))))
    return {name for name in found if not name.startswith("_")}


def _assigned(tree: ast.AST) -> Iterator[str]:
    """Attributes of self that are assigned."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "self"
        ):
            yield node.attr


def difference(ours: type, theirs: type) -> set[str]:
    """Words that one of two classes lacks, but those that a base class is excused for."""
    excused = (ONE_SIDED.get(base.__name__, {}) for base in ours.__mro__[1:])
    return (words(ours) ^ words(theirs)).difference(*excused)


def one_sided() -> dict[str, set[str]]:
    """Class name → words that one of its two sides lacks."""
    here, there = modules("reference"), modules("fast")
    found = {}
    for stem in here.keys() & there.keys():
        for one, other in product(here[stem], there[stem]):
            ours, theirs = classes(one), classes(other)
            for name in ours.keys() & theirs.keys():
                found[name] = difference(ours[name], theirs[name])
    return found


def test_both_sides_say_the_same_words() -> None:
    found = one_sided()
    assert {"FusedAdam", "DynamicLossScale"} <= found.keys()
    lacking = {name: found[name] - ONE_SIDED.get(name, {}).keys() for name in found}
    assert not any(lacking.values()), lacking


def test_every_exception_is_still_one() -> None:
    found = one_sided()
    stale = {name: kept.keys() - found.get(name, set()) for name, kept in ONE_SIDED.items()}
    assert not any(stale.values()), stale


class _Plain:
    step: int

    def clip(self) -> None:
        self.norm = self._hidden = 0.0


class _Renamed(_Plain):
    @property
    def clipped(self) -> bool:
        return self.step > 0


def test_a_word_that_one_side_lacks_is_found() -> None:
    assert words(_Plain) == {"step", "clip", "norm"}
    assert difference(_Plain, _Renamed) == {"clipped"}
