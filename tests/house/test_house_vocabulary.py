"""One vocabulary: classes of the same name say the same words on both sides.

Modules of the same name (`scalers.py` in each `optimizers/`) are compared class by class: public
methods, properties and attributes, inherited ones of ours included.
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
ONE_PASS = (
    "the reference asks for the worst gradient, then for the norm; a kernel reports both at once"
)
COPIES = "a copy between masters and model weights; the reference writes it where it steps"
RUNS = "views of a whole accumulator, for the kernels of BF16Optimizer, whose layout is shared"
# Class → word that one side alone has → why. Subclasses inherit the excuse.
ONE_SIDED = {
    "LossScale": {
        "after": MUTABLE,
        "state": MUTABLE,
        "enter": MUTABLE,
        "rule": "a pure function of the reference; the fast side has a kernel, chosen by `scaling`",
        "scaling": "names the kernel's rule and its constants",
        "compat": "chooses the kernel of a whole step; the reference's rule has it",
        "on": "moves the state to a device; the reference has no device of its own",
        "raise_if_exhausted": "reading the flag waits for the device; the reference raises at once",
    },
    "ScaledWrapper": {"sync_hyperparameters": BLOCK},
    "BF16Optimizer": {"sync_hyperparameters": BLOCK},
    "FP16Optimizer": {"groups": "private on the fast side; masters are `fp32_groups_flat` on both"},
    "FusedLamb": {"record_coeffs": "trust ratios of a step whose kernels a wrapper launches"},
    "FlatGroup": {
        "slices": "places as numbers, to cut any flat tensor",
        "pieces": "places as views of one flat tensor",
        "lists": "views for the pointer tables of kernels",
        "copy_masters_to_model": COPIES,
        "copy_model_to_masters": COPIES,
    },
    "ZeroGroup": {
        "partitions": "cuts of a gather that is one message in place on the fast side",
        "make_sums": "made when a micro-batch is summed; the reference keeps them from the start",
        "accumulated": RUNS,
        "runs": RUNS,
        "sizes": RUNS,
        "lists": "views for the pointer tables of kernels",
    },
    "Parallelism": {
        "alone": "whether what is made for one step may be kept for the next",
        "counted": ONE_PASS,
        "worst": ONE_PASS,
        "global_norm": ONE_PASS,
        "gradients": ONE_PASS,
        "places": "decided once for each parameter, at construction",
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
