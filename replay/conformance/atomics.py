"""Probes of atomics: the old value, and what lies in memory afterwards.

Every thread has words of its own. Whose turn it is where threads meet at one address is no matter
of a single instruction; the tests of threads show it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from operator import add

from twinstep.replay.conformance.memory import (
    COUNT,
    REGION,
    SPACES,
    WORDS,
    braced,
    elements,
    places,
    space_of,
    vector,
)
from twinstep.replay.conformance.operands import sampled
from twinstep.replay.conformance.probe import Probe, batch
from twinstep.replay.conformance.statements import Bits, Statement
from twinstep.replay.dtypes import width
from twinstep.replay.isa.forms import supported
from twinstep.replay.spec import floats


@functools.cache
def probes() -> tuple[Probe, ...]:
    """All probes of this module."""
    forms = [form.split(".") for form in supported()]
    return tuple(_atomics([f for f in forms if f[0] in ("atom", "red")]))


Update = Callable[[int, int, int], int]


def update(operation: str, kind: str, space: str) -> Update:
    """(old, b, c) to new, on bit patterns of one word."""
    if operation == "cas":
        return lambda old, b, c: c if old == b else old
    if operation in ("inc", "dec"):
        if operation == "inc":
            return lambda old, b, c: 0 if old >= b else old + 1
        return lambda old, b, c: b if old == 0 or old > b else old - 1
    simple: dict[str, Update] = {
        "exch": lambda old, b, c: b,
        "and": lambda old, b, c: old & b,
        "or": lambda old, b, c: old | b,
        "xor": lambda old, b, c: old ^ b,
    }
    if operation in simple:
        return simple[operation]
    if kind[0] in "us":
        plain: dict[str, Callable[[int, int], int]] = {"add": add, "min": min, "max": max}
        whole = plain[operation]
        return lambda old, b, c: floats.wrapped(
            whole(floats.integer(old, kind), floats.integer(b, kind)), kind
        )
    flushes = ".ftz" if kind == "f32" and space in ("", "global") else ""
    return lambda old, b, c: floats.arithmetic(f"{operation}{flushes}.{kind}", (old, b))


def _atomics(forms: list[list[str]]) -> Iterator[Probe]:
    groups: dict[tuple[str, tuple[str, ...]], list[Statement]] = {}
    for parts in forms:
        space = space_of(parts)
        made = _vector_atomic(parts) if vector(parts) > 1 else _atomic(parts, space)
        groups.setdefault((space, made.sources), []).append(made)
    for (space, sources), statements in groups.items():
        variables, address = SPACES[space or "global"]
        for start in range(0, len(statements), 16):
            yield batch(
                statements[start : start + 16],
                sampled(sources, f"atom.{space}.{sources}", COUNT),
                address.format(last=len(sources)),
                variables,
                scratch=REGION,
            )


def _operation(parts: list[str]) -> str:
    words = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
    return next(p for p in parts[1:] if p in words)


def _atomic(parts: list[str], space: str) -> Statement:
    """The old value (atom only) and what is in memory afterwards."""
    form, kind, operation = ".".join(parts), parts[-1], _operation(parts)
    at, bits = f".{space}" if space else "", f"b{8 * width(kind)}"
    sources = (kind,) * (3 if operation == "cas" else 2)
    values = "{b}, {c}" if operation == "cas" else "{b}"
    returns = parts[0] == "atom"
    target = "{r}, " if returns else ""
    code = f"st{at}.{bits} [%x], {{a}}; {form} {target}[%x], {values}; "
    code += f"ld{at}.{bits} {{{'s' if returns else 'r'}}}, [%x];"
    scalar, lanes = kind.removesuffix("x2"), 2 if kind.endswith("x2") else 1
    change = update(operation, scalar, space)
    size = 8 * width(kind) // lanes
    mask = (1 << size) - 1

    def want(a: int, b: int, c: int = 0) -> Bits:
        new = 0
        for lane in range(lanes):
            shift = lane * size
            new |= change(a >> shift & mask, b >> shift & mask, c >> shift & mask) << shift
        return (a, new) if returns else (new,)

    return Statement(form, sources, (kind,) * (2 if returns else 1), code, want)


def _vector_atomic(parts: list[str]) -> Statement:
    """New and (atom only) old elements; {a}, {b} are there before, {c}, {d} come."""
    form, kind, count = ".".join(parts), parts[-1], vector(parts)
    returns, bits = parts[0] == "atom", 8 * width(kind)
    stem = f"%{form.replace('.', '_')}"
    names = [f"{stem}{i}" for i in range(count)]
    new, old = places(2 * count)[:count], places(2 * count)[count:]
    target = f"{braced(old)}, " if returns else ""
    code = f""".reg .b{bits} {", ".join(names)};
    st.global.b64 [%x], {{c}}; st.global.b64 [%x+8], {{d}}; {_loaded(names, bits)}
    st.global.b64 [%x], {{a}}; st.global.b64 [%x+8], {{b}};
    {form} {target}[%x], {braced(names)}; {_loaded(new, bits)}"""
    single = _atomic(["red", "global", _operation(parts), kind], "global").want

    def want(*w: int) -> Bits:
        before, value = elements(w[:2], kind, count), elements(w[2:], kind, count)
        after = [single(x, y) for x, y in zip(before, value, strict=True)]
        changed = tuple(one[0] for one in after if one is not None)
        return changed + (tuple(before) if returns else ())

    return Statement(form, WORDS, (kind,) * (count * (1 + returns)), code, want)


def _loaded(names: list[str], bits: int) -> str:
    """Plain vector loads, four words at most in each."""
    lines = []
    for start in range(0, len(names), 4):
        part = names[start : start + 4]
        place = f"[%x+{start * bits // 8}]"
        lines.append(f"ld.global.v{len(part)}.b{bits} {braced(part)}, {place};")
    return " ".join(lines)
