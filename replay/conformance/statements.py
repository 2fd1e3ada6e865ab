"""Statements of each pure instruction form: operand types, PTX text, and its meaning.

The meaning works on bit patterns, in Python integers and fractions (`spec`), and shares no code
with what replay executes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twinstep.replay.spec import floats, integers
from twinstep.replay.spec.floats import FORMATS, decode, encode
from twinstep.replay.spec.functions import FUNCTIONS

Bits = tuple[int, ...]
Want = Callable[..., Bits | None]
BOOLEAN: dict[str, Callable[[int, int], int]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}


@dataclass(frozen=True)
class Statement:
    """One form and what it means.

    Attributes:
        form: The opcode without hints.
        sources: PTX types of the sources, as loaded from memory.
        results: PTX types of the results.
        code: PTX with {a}, {b}, ... for sources and {d}, {e} for results.
        want: Source bits to result bits; None where the ISA leaves the result open.
        approximate: Whether hardware may differ by the documented error.
    """

    form: str
    sources: tuple[str, ...]
    results: tuple[str, ...]
    code: str
    want: Want
    approximate: bool = False


def operand_types(form: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Types of sources and results of a pure form."""
    family, *parts = form.split(".")
    kind = parts[-1] if parts else ""
    if family == "cvt":
        packs = parts[-2].endswith("x2") and not kind.endswith("x2")
        return (kind,) * (2 if packs else 1), (parts[-2],)
    if family in ("setp", "set"):
        boolean = ("pred",) if set(parts) & BOOLEAN.keys() else ()
        pair = kind not in ("f16", "bf16")  # one predicate alone is allowed there
        results = ("pred", "pred")[: 1 + pair] if family == "setp" else (parts[-2],)
        return (kind, kind, *boolean), results
    if family == "prmt":
        return ("u32",) * 3, ("u32",)
    if family in ("dp4a", "dp2a"):
        return ("u32",) * 3, ("u32",)
    if family in ("popc", "clz", "bfind"):
        return (kind,), ("u32",)
    if family == "testp":
        return (kind,), ("pred",)
    if family == "selp":
        return (kind, kind, "pred"), (kind,)
    if family == "slct":
        return (parts[-2], parts[-2], kind), (parts[-2],)
    if family in ("shl", "shr"):
        return (kind, "u32"), (kind,)
    if family in ("bfe", "bfi"):
        return (kind,) * (1 if family == "bfe" else 2) + ("u32", "u32"), (kind,)
    if "wide" in parts:
        wide = f"{kind[0]}{2 * int(kind[1:])}"
        return (kind, kind) + ((wide,) if family == "mad" else ()), (wide,)
    if family in ("addc", "subc", "madc"):
        values = (kind,) * (3 if family == "madc" else 2)
        return (*values, "pred"), (kind, "pred") if "cc" in parts else (kind,)
    if family == "mad" and "cc" in parts:
        return (kind,) * 3, (kind, "pred")
    if _is_mixed(parts):
        return (kind,) * (_count(family) - 1) + ("f32",), ("f32",)
    if "cc" in parts:
        return (kind, kind), (kind, "pred")
    return (kind,) * _count(family), (kind,)


def _is_mixed(parts: list[str]) -> bool:
    """True if fp32 arithmetic takes 16-bit sources: add, sub, fma."""
    return parts[-2:-1] == ["f32"] and parts[-1] in ("f16", "bf16")


def _count(family: str) -> int:
    if family in ("fma", "mad", "mad24", "sad", "lop3", "shf"):
        return 3
    binary = "add sub mul mul24 div rem min max copysign and or xor bmsk szext"
    return 2 if family in binary.split() else 1


def code_of(form: str) -> str:
    """The PTX of a form; carries go in and out through the flag."""
    family, *parts = form.split(".")
    sources, results = operand_types(form)
    names = [f"{{{'abc'[i] if i < 3 else 'd'}}}" for i in range(len(sources))]
    if family in ("addc", "subc", "madc") or "cc" in parts:
        values = [name for name, source in zip(names, sources, strict=True) if source != "pred"]
        text = f"{form} {{r}}, {', '.join(values)};"
        if family in ("addc", "madc"):
            text = f"selp.u32 %t, 1, 0, {names[-1]}; add.cc.u32 %t, %t, 0xFFFFFFFF; {text}"
        elif family == "subc":
            text = f"selp.u32 %t, 1, 0, {{c}}; sub.cc.u32 %t, 0, %t; {text}"
        read = "subc" if family in ("sub", "subc") else "addc"
        if len(results) == 2:
            text += f" {read}.u32 %t, 0, 0; setp.ne.u32 {{s}}, %t, 0;"
        return text
    if family == "lop3":
        return f"{form} {{r}}, {{a}}, {{b}}, {{c}}, 0x9A;"
    pair = "{r}|{s}" if len(results) == 2 else "{r}"
    return f"{form} {pair}, {', '.join(names)};"


def statement(form: str) -> Statement:
    """The statement of a pure form.

    Raises:
        KeyError: there is none.
    """
    sources, results = operand_types(form)
    approximate = bool({"approx", "full"} & set(form.split(".")))
    return Statement(form, sources, results, code_of(form), _want(form), approximate)


def _want(form: str) -> Want:
    family, *parts = form.split(".")
    kind = parts[-1]
    scalar = kind.removesuffix("x2")
    if family in _SPECIAL:
        return _SPECIAL[family](form)
    if family == "cvt":
        return _conversion(parts)
    if family in ("addc", "subc") or "cc" in parts or family == "madc":
        return _carried(family, parts)
    if family in ("add", "sub", "fma") and _is_mixed(parts):
        return _mixed(form.removesuffix(f".{kind}"), kind)
    if scalar not in FORMATS and scalar != kind:
        return _halves(form.removesuffix("x2"), 16)
    if scalar not in FORMATS:
        return _integer(form)
    if scalar != kind:
        return _halves(form.removesuffix("x2"), sum(FORMATS[scalar]) + 1)
    return _floating(form)


def _floating(form: str) -> Want:
    family, *parts = form.split(".")
    kind = parts[-1]
    if family in FUNCTIONS or family == "rsqrt" or (kind == "f64" and "approx" in parts):
        return lambda *bits: (approximate(form, bits[0]),)
    if family == "copysign":
        low = (1 << sum(FORMATS[kind])) - 1
        return lambda a, b: (a & ~low | b & low,)
    exact = form.replace(".approx", ".rn").replace(".full", ".rn").replace("mad", "fma")
    if form.startswith("div.approx"):
        return lambda a, b: (floats.quick_quotient(exact, a, b),)
    return lambda *bits: (floats.arithmetic(exact, bits),)


def approximate(form: str, bits: int) -> int:
    """The correctly rounded value of an approximate function, `.ftz` applied."""
    family, *parts = form.split(".")
    kind, ftz = parts[-1], "ftz" in parts
    if kind == "f64" and ftz:
        return floats.gross(family, bits)
    number = decode(bits, kind)
    number = floats.flushed(number, kind) if ftz else number
    if family == "rsqrt":
        found = encode(floats.inverse_root(number), kind)
    else:
        found = FUNCTIONS[family](number, kind)
    return encode(floats.flushed(decode(found, kind), kind), kind) if ftz else found


def _halves(scalar: str, bits: int) -> Want:
    single, mask = statement(scalar).want, (1 << bits) - 1

    def both(*words: int) -> Bits:
        low = single(*(w & mask for w in words))
        high = single(*(w >> bits for w in words))
        assert low is not None
        assert high is not None
        return (high[0] << bits | low[0],)

    return both


def _integer(form: str) -> Want:
    function = integers.meaning_of(form)
    if form.startswith(("div", "rem")):
        return lambda a, b: (function(a, b),) if b else None
    return lambda *bits: (function(*bits),)


def _conversion(parts: list[str]) -> Want:
    target, source = parts[-2:]
    if target == "tf32":
        return lambda a: (floats.tf32(a, *parts[:-2]),)
    if source.endswith("x2"):
        return _halves_converted(parts)
    if target.endswith("x2"):
        form = ".".join(["cvt", *parts[:-2], target[:-2], source])
        width = sum(FORMATS[target[:-2]]) + 1
        return lambda a, b: (floats.convert(form, a) << width | floats.convert(form, b),)
    form = ".".join(["cvt", *parts])
    if target in ("u8", "s8"):  # extended to the register, which has 16 bits
        return lambda a: (floats.integer(floats.convert(form, a), target) & 0xFFFF,)
    return lambda a: (floats.convert(form, a),)


def _halves_converted(parts: list[str]) -> Want:
    target, source = (kind[:-2] for kind in parts[-2:])
    form = ".".join(["cvt", *parts[:-2], target, source])
    wide, narrow = (sum(FORMATS[kind]) + 1 for kind in (target, source))
    low = (1 << narrow) - 1
    return lambda a: (floats.convert(form, a >> narrow) << wide | floats.convert(form, a & low),)


def _mixed(form: str, kind: str) -> Want:
    def function(*bits: int) -> Bits:
        wide = (encode(decode(x, kind), "f32") for x in bits[:-1])
        return (floats.arithmetic(form, (*wide, bits[-1])),)

    return function


def _carried_product(parts: list[str]) -> Want:
    width = int(parts[-1][1:])
    mask = (1 << width) - 1
    half = integers.meaning_of(f"mul.{parts[0]}.{parts[-1]}")

    def function(a: int, b: int, c: int, carry: int = 0) -> Bits:
        value = (half(a, b) & mask) + (c & mask) + carry
        return (value & mask, value >> width) if "cc" in parts else (value & mask,)

    return function


def _carried(family: str, parts: list[str]) -> Want:
    if family in ("mad", "madc"):
        return _carried_product(parts)
    kind = parts[-1]
    mask = (1 << int(kind[1:])) - 1

    def function(a: int, b: int, carry: int = 0) -> Bits:
        value = a + b + carry if family.startswith("add") else a - b - carry
        flag = int(value != value & mask)
        return (value & mask, flag) if "cc" in parts else (value & mask,)

    return function


def _compared(parts: list[str]) -> Callable[[int, int], int]:
    """A comparison of two scalars."""
    name, kind = parts[0], parts[-1]
    if kind not in FORMATS:
        return integers.meaning_of(f"setp.{name}.{kind}")

    def function(a: int, b: int) -> int:
        x, y = decode(a, kind), decode(b, kind)
        if "ftz" in parts:
            x, y = floats.flushed(x, kind), floats.flushed(y, kind)
        return int(floats.compare(name, x, y))

    return function


def _predicate(form: str) -> Want:
    parts = form.split(".")[1:]
    combine = next((BOOLEAN[p] for p in parts if p in BOOLEAN), lambda a, b: a)
    if not parts[-1].endswith("x2"):
        compare = _compared(parts)

        def scalar(a: int, b: int, c: int = 0) -> Bits:
            found = compare(a, b)
            return combine(found, c), combine(1 - found, c)

        return scalar
    halves = _compared([*parts[:-1], parts[-1][:-2]])

    def packed(a: int, b: int, c: int = 0) -> Bits:
        low, high = halves(a & 0xFFFF, b & 0xFFFF), halves(a >> 16, b >> 16)
        return combine(low, c), combine(high, c)

    return packed


def _value(form: str) -> Want:
    parts = form.split(".")[1:]
    target = parts.pop(-2)
    combine = next((BOOLEAN[p] for p in parts if p in BOOLEAN), lambda a, b: a)
    compare, one = _compared(parts), 0x3F800000 if target == "f32" else 0xFFFFFFFF
    return lambda a, b, c=0: (one if combine(compare(a, b), c) else 0,)


def _chosen(form: str) -> Want:
    kind = form.split(".")[-1]
    if kind != "f32":
        return lambda a, b, c: (b if c >> 31 else a,)

    def function(a: int, b: int, c: int) -> Bits:
        number = decode(c, kind)
        if "ftz" in form:
            number = floats.flushed(number, kind)
        negative = number.special == "nan" or (number.negative and not number.zero)
        return (b if negative else a,)

    return function


def _class(form: str) -> Want:
    _, test, kind = form.split(".")

    def function(bits: int) -> Bits:
        number = decode(bits, kind)
        small = not number.zero and floats.flushed(number, kind).zero
        found = {
            "finite": not number.special,
            "infinite": number.special == "inf",
            "number": number.special != "nan",
            "notanumber": number.special == "nan",
            "normal": not number.special and not number.zero and not small,
            "subnormal": not number.special and small,
        }[test]
        return (int(found),)

    return function


def _lookup(form: str) -> Want:
    def function(a: int, b: int, c: int) -> Bits:
        bits = ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1 for i in range(32))
        return (sum((0x9A >> index & 1) << i for i, index in enumerate(bits)),)

    return function


_SPECIAL: dict[str, Callable[[str], Want]] = {
    "setp": _predicate,
    "set": _value,
    "slct": _chosen,
    "selp": lambda form: lambda a, b, p: (a if p else b,),
    "testp": _class,
    "lop3": _lookup,
}
