"""Index arithmetic holds past 2^31 elements.

The last tensor is blown up to more than 2^31 elements with the case's values at both ends and in
the middle, and all three agree with the reference; so do some thousand elements behind 2^24 and at
a drawn place, which hold them over and over. On replay, past 2^32 elements as well: the tensor is
virtual and only the blocks of these places run; in a grid of several axes those at the ends and in
the middle of every axis alone. On a GPU the memory is real, if there is enough. A program that
walks over the whole tensor takes replay too long, and torch on all of it needs its memory: then the
cell is skipped.

Where a result depends on all elements, as by LAMB's norms, the small tensor lies there once, cut
into three: at both ends and in the middle. All else is zero, which adds nothing to a norm and
stays zero.

Real bugs: tensor sizes held in 32 bits, so that the loop never runs and weights silently stay as
they are (deepspeedai/DeepSpeed#7640, NVIDIA/apex#1825, NVIDIA/TransformerEngine#2918); a 32-bit
product of program and block that wraps (linkedin/Liger-Kernel#251, linkedin/Liger-Kernel#1248,
bitsandbytes-foundation/bitsandbytes#1784). An index that is kept in fp32 is wrong in a few elements
behind each power of two from 2^24 on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from twinstep.parity.cases.case import Case
from twinstep.parity.cases.generate import generate
from twinstep.parity.laws.base import Draw, Law
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.plan import Plan, Values

# Small enough for a few blocks of 32 elements.
SIZES = {"flat": (250,), "list": (5, 33, 250)}
PLACES = ("first", "middle", "last", "past 2**24", "drawn")
APART = "apart"


def places(case: Case) -> tuple[str, ...]:
    """The places that are looked at; `APART` are three that hold one tensor."""
    return (APART,) if case.operation.whole_tensors else PLACES


def grown(case: Case) -> Iterable[Case]:
    """The recipe of the case with a last tensor of a few hundred elements."""
    recipe = replace(case.recipe, sizes=SIZES[case.recipe.layout], dims=1, requires_grad=False)
    if case.operation.whole_tensors:
        # Without eps the zeros would be 0 / 0, and one element alone may be all of a norm.
        controls = {name: v or 1e-8 if name == "eps" else v for name, v in recipe.controls.items()}
        recipe = replace(recipe, controls=controls, regime="ordinary")
    return [generate(case.operation, case.combination, recipe)]


def plan(case: Case, arithmetic: str) -> Plan:
    """One call on the large tensor, looked at in its places."""
    first, *others = places(case)
    later = (Call(case=case, end=end, reuse=0) for end in others)
    calls = (Call(case=case, end=first), *later)
    return Plan(calls=calls, checks=tuple(Values(call=number) for number in range(len(calls))))


LARGE_INDEX = Law(
    name="large_index",
    says="index arithmetic holds past 2^31 elements",
    share=0.0,
    each_layout=True,
    draw=Draw(regimes=("mixture",)),
    vary=grown,
    plan=plan,
    engines=("cuda", "replay"),
)
