"""The table of bounds: operators of torch that references may use, by families with one rule each.

`python -m twinstep.parity.cli.bounds_page` prints docs/reference/bounds.md from it. The names are
those of `torch.ops.aten`, which methods, functions and operators of torch end in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from twinstep.parity.expected.bounds import (
    absolute,
    extremum,
    multiply,
    negate,
    reciprocal,
    square_root,
    sum_of,
    where_rule,
)
from twinstep.parity.expected.bounds_blocks import (
    averaged,
    extreme,
    in_order,
    moved,
    multiplied,
    padded,
    place,
    running,
    summed,
)
from twinstep.parity.expected.bounds_conditions import CONDITIONS, every, some
from twinstep.parity.expected.bounds_functions import (
    TANH,
    angle,
    between,
    inverse_root,
    magnitude,
    negative_exponential,
    of_ends,
    power,
    quotient,
    remainder_of,
    signed_as,
    wrapped,
)
from twinstep.parity.expected.bounds_matmul import product
from twinstep.parity.expected.carried import Rule, of_operands


@dataclass(frozen=True, kw_only=True)
class Family:
    """Operators whose rules are of one kind.

    Attributes:
        title: of the family.
        says: the rule, in a sentence.
        rules: by operator.
        keeps: gives numbers that it is given: a rounding to storage that is pending stays so.
        rounds: a result of 16 bits is rounded to them.
        settles: the absolute term is added, and overflow found.
    """

    title: str
    says: str
    rules: Mapping[str, Rule]
    keeps: bool = False
    rounds: bool = True
    settles: bool = True


ARITHMETIC = Family(
    title="arithmetic",
    says="a rounding, charged twice; in a product of matrices one for each of n terms",
    rules={
        "add": sum_of(1.0),
        "bmm": of_operands(product),
        "mm": of_operands(product),
        "mul": of_operands(multiply),
        "pow": of_operands(power),
        "reciprocal": of_operands(reciprocal),
        "rsqrt": of_operands(inverse_root),
        "rsub": sum_of(-1.0, turned=True),
        "sqrt": of_operands(square_root),
        "sub": sum_of(-1.0),
    },
)
QUOTIENTS = Family(
    title="quotients",
    says="as arithmetic; with a rounding mode as a step",
    rules={
        "div": quotient,
        "floor_divide": lambda f, args, kwargs: quotient(f, args, {"rounding_mode": "floor"}),
    },
    settles=False,
)
REMAINDERS = Family(
    title="remainders",
    says="as arithmetic; as wide as the divisor where the quotient may step",
    rules={
        "fmod": of_operands(remainder_of(torch.trunc)),
        "remainder": of_operands(remainder_of(torch.floor)),
    },
)
CHOICES = Family(
    title="choices",
    says="nothing is rounded; where the condition is open, from one branch to the other",
    rules={
        "fmax": of_operands(extremum(torch.fmax)),
        "fmin": of_operands(extremum(torch.fmin)),
        "maximum": of_operands(extremum(torch.maximum)),
        "minimum": of_operands(extremum(torch.minimum)),
        "where": of_operands(where_rule),
    },
    keeps=True,
    rounds=False,
)
SIGNS = Family(
    title="signs",
    says="nothing is rounded",
    rules={
        "abs": of_operands(absolute),
        "copysign": of_operands(signed_as),
        "neg": of_operands(negate),
    },
    keeps=True,
    rounds=False,
    settles=False,
)
LIMITS = Family(
    title="limits",
    says="the interval of the ends",
    rules={
        "clamp": between("min", "max"),
        "clamp_max": between("max"),
        "clamp_min": between("min"),
        "hardtanh": of_ends,
        "relu": of_ends,
    },
    keeps=True,
    rounds=False,
    settles=False,
)
STEPS = Family(
    title="steps",
    says="the interval of the ends: both sides of a jump that the operand meets",
    rules=dict.fromkeys(("ceil", "floor", "round", "sgn", "sign", "trunc"), of_ends),
    rounds=False,
    settles=False,
)
FUNCTIONS = Family(
    title="functions",
    says="the interval of the ends, or the slope; a rounding, and the library's error",
    rules={
        **{
            name: wrapped(name)
            for name in ("acos", "acosh", "asin", "asinh", "atan", "atanh", "erf", "erfc")
        },
        **{name: wrapped(name) for name in ("log", "log10", "log1p", "log2")},
        **{name: wrapped(name, spread=magnitude) for name in ("exp", "exp2", "expm1", "sinh")},
        "atan2": of_operands(angle),
        "cos": wrapped("cos", turns="wave"),
        "cosh": wrapped("cosh", spread=magnitude, turns="even"),
        "sigmoid": wrapped("sigmoid", spread=negative_exponential),
        "sin": wrapped("sin", turns="wave"),
        "tan": wrapped("tan", turns="tan"),
        "tanh": wrapped("tanh", absolute=TANH),
    },
)
COMPARISONS = Family(
    title="comparisons",
    says="open where another honest operand decides otherwise",
    rules={
        **{name: of_operands(rule) for name, rule in CONDITIONS.items()},
        "all": every,
        "any": some,
    },
    rounds=False,
    settles=False,
)
REDUCTIONS = Family(
    title="reductions",
    says="a rounding for each of n terms, in any order",
    rules={
        "cumsum": running,
        "mean": averaged,
        "prod": multiplied,
        "sum": summed,
    },
    settles=False,
)
ORDERS = Family(
    title="extremes and orders",
    says="the interval of the ends; places are open where errors could change them",
    rules={
        **dict.fromkeys(("amax", "amin", "max", "min"), extreme),
        **dict.fromkeys(("argmax", "argmin", "argsort"), place),
        **dict.fromkeys(("sort", "topk"), in_order),
    },
    keeps=True,
    rounds=False,
    settles=False,
)
MOVES = Family(
    title="moves",
    says="every element keeps what it carries; indices have to be certain",
    rules={
        **dict.fromkeys(("_unsafe_view", "alias", "cat", "clone", "detach", "diagonal"), moved),
        **dict.fromkeys(("expand", "flip", "gather", "index", "index_put", "index_select"), moved),
        **dict.fromkeys(("lift_fresh", "permute", "repeat", "roll", "select"), moved),
        **dict.fromkeys(("select_scatter", "slice", "slice_scatter", "split"), moved),
        **dict.fromkeys(("split_with_sizes", "squeeze", "stack", "t", "transpose"), moved),
        **dict.fromkeys(("tril", "triu", "unbind", "unfold", "unsqueeze", "view"), moved),
        "constant_pad_nd": padded,
    },
    keeps=True,
    rounds=False,
    settles=False,
)
CREATORS = frozenset(
    {
        *("empty_like", "full_like", "ones_like", "zeros_like"),
        *("new_empty", "new_full", "new_ones", "new_zeros", "zero"),
    }
)
FORMULAS = Family(
    title="formulas",
    says="the bound of the formula that it stands for",
    rules={},
    settles=False,
)
FAMILIES = (
    *(ARITHMETIC, QUOTIENTS, REMAINDERS, SIGNS, CHOICES, LIMITS, STEPS, FUNCTIONS),
    *(COMPARISONS, REDUCTIONS, ORDERS, MOVES),
)
FAMILY_OF = {name: family for family in FAMILIES for name in family.rules}
