"""Every size works: none, one, around vectors and blocks, primes, many tiny, empties anywhere.

Real bugs: the last partial block dropped or written unmasked; a grid of zero programs; an index
that skips the tensor after an empty one; a pointer table that holds 64 tensors and no more; a
vectorised path that needs sizes divisible by 4.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from parity.case import Case
from parity.expand import expand
from parity.laws.base import Draw, Law
from parity.plan import Call, Plan, Untouched, Values

FLAT_SIZES = (0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 257)
FLAT_BLOCKS = (511, 513, 1021, 1023, 1025, 2047, 4095, 4096, 4097, 12_289)
LISTS = (
    (),
    (0,),
    (0, 0, 1),
    (1, 0, 2, 0),
    (0, 5, 0, 0, 31, 33, 0),
    (1,) * 70,
    (127, 128, 129, 255, 256, 257),
    (12, 28, 24),
    (511, 512, 513, 1023, 1024, 1025),
    (4095, 4096, 4097),
    (4099, 1, 0, 8191, 7),
)


def sized(case: Case) -> Iterable[Case]:
    """The recipe of the case with each of the sizes."""
    operation, recipe = case.operation, case.recipe
    if recipe.layout == "list":
        rows: Iterable[tuple[int, ...]] = LISTS
    else:
        rows = [(size,) for size in (*FLAT_SIZES, *FLAT_BLOCKS)]
    for number, sizes in enumerate(rows):
        planes = number % 2 == 1
        yield expand(operation, case.combination, replace(recipe, sizes=sizes, planes=planes))


def plan(case: Case, arithmetic: str) -> Plan:
    """One call, compared with the reference, guards included."""
    return Plan(calls=(Call(case=case),), checks=(Values(), Untouched()))


BOUNDARY_SIZES = Law(
    name="boundary_sizes",
    says="sizes around every boundary, empties anywhere",
    share=0.0,
    each_layout=True,
    draw=Draw(regimes=("ordinary",), sizes="small"),
    vary=sized,
    plan=plan,
)
