"""Operations of torch that are followed on names, by their names without a trailing underscore."""

from __future__ import annotations

BINARY = {"add": "add", "sub": "sub", "mul": "mul", "div": "div"}
"""One rounding each, to the type of the result."""

UNARY = {"neg": "neg", "abs": "abs", "sqrt": "sqrt", "reciprocal": "reciprocal", "sign": "sign"}

COMPARE = {"eq": "eq", "ne": "neu", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge"}
"""By the comparison of PTX that a NaN decides alike."""

MOVES = frozenset(
    ("cat", "stack", "index_select", "gather", "repeat", "flip", "roll", "tril", "triu", "index")
    + ("_reshape_copy", "slice_scatter", "select_scatter", "_unsafe_view", "narrow_copy")
)
"""Elements change places and nothing else."""

LOGIC = {
    **dict.fromkeys(("logical_and", "bitwise_and", "__and__", "mul"), "and"),
    **dict.fromkeys(("logical_or", "bitwise_or", "__or__", "add"), "or"),
    **dict.fromkeys(("logical_not", "bitwise_not"), "not"),
}
"""Of truth values."""

INTEGER = {
    **{"add": "add.u{}", "sub": "sub.u{}"},
    **dict.fromkeys(("bitwise_and", "__and__"), "and.b{}"),
    **dict.fromkeys(("bitwise_or", "__or__"), "or.b{}"),
    **dict.fromkeys(("bitwise_xor", "__xor__"), "xor.b{}"),
    **dict.fromkeys(("bitwise_left_shift", "__lshift__"), "shl.b{}"),
    **dict.fromkeys(("bitwise_right_shift", "__rshift__"), "shr.s{}"),
}
"""Of integers, by the opcode of PTX with a place for the number of bits."""
