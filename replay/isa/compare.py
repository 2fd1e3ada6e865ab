"""Comparisons: setp, set and testp, with their ordered and unordered floating forms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from twinstep.replay.dtypes import NUMPY, Array
from twinstep.replay.isa.operations import Operation, Table
from twinstep.replay.isa.rounding import bf16_to_f32, flush

Comparison = Callable[[Array, Array], Array]

_BASIC: dict[str, Comparison] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_COMPLEMENT = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}
_FLOATS = frozenset({"f16", "f32", "f64", "bf16"})
_COMBINE: dict[str, Comparison] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}


def comparison(name: str, is_float: bool) -> Comparison:
    """The boolean function of a comparison modifier."""
    if not is_float:
        return _BASIC[name]
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if name == "ne":  # ordered: false when either is NaN
        return lambda a, b: (a != b) & ~(np.isnan(a) | np.isnan(b))
    if name == "neu":
        return np.not_equal
    if name in _COMPLEMENT:
        opposite = _BASIC[_COMPLEMENT[name]] if name != "equ" else None
        if opposite is None:
            return lambda a, b: (a == b) | np.isnan(a) | np.isnan(b)
        return lambda a, b: ~opposite(a, b)
    return _BASIC[name]


def prepared(kind: str, parts: tuple[str, ...], compare: Comparison) -> Comparison:
    """A comparison on values as registers hold them (bf16 as bits, `.ftz` applied)."""
    if kind == "bf16":
        return lambda a, b: compare(bf16_to_f32(a), bf16_to_f32(b))
    if "ftz" in parts:
        return lambda a, b: compare(flush(a), flush(b))
    return compare


def _set_predicate(parts: tuple[str, ...]) -> Operation:
    kind = parts[-1]
    compare = prepared(kind, parts, comparison(parts[1], kind in _FLOATS))
    boolean = next((p for p in parts[2:-1] if p in _COMBINE), "")
    if not boolean:

        def both(a: Array, b: Array) -> tuple[Array, Array]:
            result = compare(a, b)
            return result, ~result

        return Operation(both, (kind, kind), ("pred", "pred"), first=compare)
    combine = _COMBINE[boolean]

    def combined(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
        result = compare(a, b)
        return combine(result, c), combine(~result, c)

    return Operation(
        combined,
        (kind, kind, "pred"),
        ("pred", "pred"),
        first=lambda a, b, c: combine(compare(a, b), c),
    )


def _packed_predicate(parts: tuple[str, ...]) -> Operation:
    scalar = parts[-1][:-2]
    compare = prepared(scalar, parts, comparison(parts[1], True))

    def half(x: Array, shift: int) -> Array:
        return (x >> np.uint32(shift)).astype(np.uint16).view(NUMPY[scalar])

    def function(a: Array, b: Array, *rest: Array) -> tuple[Array, Array]:
        low, high = compare(half(a, 0), half(b, 0)), compare(half(a, 16), half(b, 16))
        return (combine(low, *rest), combine(high, *rest)) if rest else (low, high)

    boolean = next((p for p in parts[2:-1] if p in _COMBINE), "")
    combine = _COMBINE.get(boolean, np.logical_and)
    return Operation(function, ("u32", "u32") + (("pred",) if boolean else ()), ("pred", "pred"))


def _set_value(parts: tuple[str, ...]) -> Operation:
    target, kind = parts[-2], parts[-1]
    compare = prepared(kind, parts, comparison(parts[1], kind in _FLOATS))
    boolean = next((p for p in parts[2:-2] if p in _COMBINE), "")
    one = np.float32(1) if target == "f32" else np.uint32(0xFFFFFFFF)

    def function(a: Array, b: Array, *rest: Array) -> Array:
        result = compare(a, b)
        if boolean:
            result = _COMBINE[boolean](result, rest[0])
        return np.where(result, one, one.dtype.type(0))

    sources = (kind, kind, "pred") if boolean else (kind, kind)
    return Operation(function, sources, ("f32" if target == "f32" else "u32",))


def _test(parts: tuple[str, ...]) -> Operation:
    tiny = 2.0**-126 if parts[-1] == "f32" else 2.0**-1022
    tests: dict[str, Callable[[Array], Array]] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a: ~np.isnan(a),
        "notanumber": np.isnan,
        "normal": lambda a: np.isfinite(a) & (np.abs(a) >= tiny),
        "subnormal": lambda a: (np.abs(a) < tiny) & (a != 0),
    }
    return Operation(tests[parts[1]], (parts[-1],), ("pred",))


_SIGNED, _UNSIGNED = "eq,ne,lt,le,gt,ge ?and,or,xor", "lo,ls,hi,hs ?and,or,xor"
_BITS, _FLOAT = "eq,ne ?and,or,xor", "$compare ?and,or,xor"
_SET = "u32,s32,f32"
FORMS: Table = {
    f"setp: {_SIGNED} | $int": _set_predicate,
    f"setp: {_UNSIGNED} | u16,u32,u64": _set_predicate,
    f"setp: {_BITS} | b16,b32,b64": _set_predicate,
    f"setp: {_FLOAT} ?ftz | f32,f16": _set_predicate,
    f"setp: {_FLOAT} | f64,bf16": _set_predicate,
    f"setp: {_FLOAT} ?ftz | f16x2": _packed_predicate,
    f"setp: {_FLOAT} | bf16x2": _packed_predicate,
    f"set: {_SIGNED} | {_SET} $int": _set_value,
    f"set: {_UNSIGNED} | {_SET} u16,u32,u64": _set_value,
    f"set: {_BITS} | {_SET} b16,b32,b64": _set_value,
    f"set: {_FLOAT} ?ftz | {_SET} f32": _set_value,
    f"set: {_FLOAT} | {_SET} f64": _set_value,
    "testp: finite,infinite,number,notanumber,normal,subnormal | f32,f64": _test,
}
