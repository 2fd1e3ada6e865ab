"""No two threads touch the same bytes without an order between them, one of them writing.

On replay every access of a call is compared with those before it. Within a block a barrier orders
two accesses, between blocks only atomics that acquire and release do. A plain read or write that
meets a plain or atomic write of another thread without such an order is a race, whatever came out
this time. A store of the value that is there already is none, nor is an atomic or `volatile` load
beside an atomic, unless a block stores what it has so found (see replay/README.md). Tensors are
large enough for several blocks, every step is taken, and where gradients are searched for overflow
the first and the last of them overflow. The call is made again with its blocks one by one,
backwards, and permuted by threes, unless it waits for blocks that then do not run, and one by one
accesses are compared again; bounded kernels must give the same bits too. In the first call floating
atomic sums that another order would round otherwise, those of loops of compare-and-swap as well,
are moved by a few units of their last place, and no result may show it. Streams that touch the same
bytes must have waited for one another.

Real bugs: a block reduction without its last barrier, so that the norms of LAMB differ on new GPUs
(NVIDIA/apex#1798, pytorch/pytorch#5242); an overflow flag cleared by one block while others raise
it (NVIDIA/apex#753); a counter advanced by one block while others read it; a sum that every block
reads, adds to and stores back; partial sums added by floating atomics (triton-lang/triton#6227).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from twinstep.parity.cases.case import Case
from twinstep.parity.cases.generate import generate
from twinstep.parity.cases.planting import plant
from twinstep.parity.laws.base import Draw, Law
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.plan import Plan, Same

SCHEDULES = ("one by one", "backwards", "permuted")
# More than one block of any usual size; whole tensors are usually left to larger ones.
LONG, LONGER = 4103, 16_391


def crowded(case: Case) -> Iterable[Case]:
    """The recipe of the case with a long tensor, taken; also with an overflow at either end."""
    operation, recipe = case.operation, case.recipe
    if not operation.lists:
        return [case]
    flat = recipe.layout == "flat"
    long = LONGER if flat and operation.whole_tensors else LONG
    sizes = (long,) if flat else (5, long, 1, 130)
    grown = generate(operation, case.combination, replace(recipe, sizes=sizes, dims=1))
    if any(control.name == "found_inf" for control in operation.controls):
        grown = grown.with_controls(found_inf=0.0)
    if "found_inf" not in operation.writes or not operation.watched:
        return [grown]
    name = operation.watched[0]
    index = sizes.index(long)
    bad = plant(plant(grown, name, index, 0, "+inf"), name, index, long - 1, "NaN")
    return [grown, bad]


def plan(case: Case, arithmetic: str) -> Plan:
    """One call, its accesses compared, and the same one with its blocks in other orders."""
    # Blocks that run together store equal values of what only the last of them should read.
    # What nothing has written holds NaNs: a store of what is there by chance would count as none.
    first = Call(case=case, races=True, garbage="set bits")
    others = tuple(replace(first, schedule=name, races=name == "one by one") for name in SCHEDULES)
    numbers = range(1, len(others) + 1)
    says = "depends on the order in which blocks run"
    checks = tuple(Same(says=says, second=number) for number in numbers)
    return Plan(calls=(first, *others), checks=checks)


RACE_FREE = Law(
    name="race_free",
    says="no two threads touch bytes without an order; no result depends on that of blocks",
    share=0.1,
    each_layout=True,
    draw=Draw(regimes=("ordinary",)),
    vary=crowded,
    plan=plan,
    engines=("replay",),
)
