"""Every size works: none, one, around vectors and blocks, primes, many tiny, empties anywhere.

Tensors have 0 to 4 dimensions in turn; one list is longer than a byte can count. Matrices have up
to thousands of rows or columns. In one case more each gradient is long and has one element that is
not zero, as after a batch that uses one token.

Real bugs: a scalar tail with another formula (deepspeedai/DeepSpeed#503); a grid of zero programs
(bytedance/lightseq#98); a trailing empty tensor that drops the last launch
(NVIDIA/TransformerEngine#3212, pytorch/pytorch#109402); rows taken for elements
(deepspeedai/DeepSpeed#3109, hpcaitech/ColossalAI#633); an empty parameter that makes a scale NaN
(deepspeedai/DeepSpeed#7736).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from twinstep.parity.cases.case import Case
from twinstep.parity.cases.generate import generate, one_used
from twinstep.parity.laws.base import Draw, Law
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.plan import Plan, Untouched, Values
from twinstep.parity.operations.operation import Role

FLAT_SIZES = (0, 1, 2, 3, 5, 7, 8, 15, 17, 31, 33, 65, 127, 129, 257)
FLAT_BLOCKS = (511, 513, 1023, 1025, 4095, 4096, 4097, 10_001, 12_289)
# Dimensions in turn: the second size and the seventh list have scalars.
DIMS = (2, 0, 3, 1, 4)
LISTS = (
    (),
    (0,),
    (0, 0, 1),
    (1, 0, 2, 0),
    (0, 5, 0, 0, 31, 33, 0),
    (127, 128, 129, 255, 256, 257),
    (0, *(1, 3, 2) * 86),
    (12, 28, 24),
    (511, 512, 513, 1001, 1023, 1024, 1025),
    (4095, 4096, 4097, 4096),
    (4099, 1, 0, 8191, 7, 10_001),
    (8192, 20_481, 20_481),
)
# Tall and wide in turn, odd and aligned.
MATRICES: tuple[int, ...] = (3 * 1021, 3 * 1021, 2 * 131, 2 * 131, 5 * 4096)
SINGLE = ((MATRICES[:1], 0), (MATRICES[:1], 1), (MATRICES[-1:], 1))
LONE = (10_007, 3, 6_011)


def sized(case: Case) -> Iterable[Case]:
    """The recipe of the case with each of the sizes, and one with sparse gradients."""
    operation, recipe = case.operation, case.recipe
    if recipe.layout == "list":
        rows: Iterable[tuple[int, ...]] = LISTS
    else:
        rows = [(size,) for size in (*FLAT_SIZES, *FLAT_BLOCKS)]
    known = [dims for dims in DIMS if dims in operation.dims] or operation.dims
    for number, sizes in enumerate(rows):
        dims = known[number % len(known)]
        yield generate(operation, case.combination, replace(recipe, sizes=sizes, dims=dims))
    if 2 in operation.dims:
        # The first tensor of an odd seed is wide (`generate`).
        for sizes, wide in [(MATRICES, 1)] if recipe.layout == "list" else SINGLE:
            matrices = replace(recipe, sizes=sizes, dims=2, seed=recipe.seed & ~1 | wide)
            yield generate(operation, case.combination, matrices)
    if operation.lists_of(Role.GRAD):
        sizes = LONE if recipe.layout == "list" else LONE[:1]
        yield one_used(generate(operation, case.combination, replace(recipe, sizes=sizes, dims=1)))


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
