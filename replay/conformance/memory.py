"""Probes of instructions that move data: mov, ld, st, address windows, asynchronous copies.

Each thread has REGION bytes of its own in the state space at hand, addressed by %x. They are filled
and read back with plain 64-bit accesses, and all of them are compared, so that a write beside
its place shows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from twinstep.replay.conformance.operands import sampled
from twinstep.replay.conformance.probe import LETTERS, THREADS, Probe, batch, register
from twinstep.replay.conformance.statements import Bits, Statement
from twinstep.replay.dtypes import raw, width
from twinstep.replay.isa.forms import supported

REGION = 32
WORDS = ("u64",) * 4
COUNT = 128

_SHARED = (
    f".shared .align 32 .b8 buffer[{REGION * THREADS}];",
    "mov.u32 %t, %tid.x; mul.wide.u32 %x, %t, 32; mov.u64 %at, buffer; add.u64 %x, %x, %at;",
)
SPACES: dict[str, tuple[str, str]] = {
    "global": ("", "ld.param.u64 %x, [p{last}]; mad.lo.u64 %x, %w, 32, %x;"),
    "shared": _SHARED,
    "shared::cta": _SHARED,
    "local": (f".local .align 32 .b8 buffer[{REGION}];", "mov.u64 %x, buffer;"),
}
"""For each state space: the variable it needs, and the code that makes a thread's address."""


@functools.cache
def probes() -> tuple[Probe, ...]:
    """All probes of this module."""
    forms = [form.split(".") for form in supported()]
    return (
        *_moves([f for f in forms if f[0] == "mov"]),
        *_accesses([f for f in forms if f[0] in ("ld", "ldu", "st") and "param" not in f]),
        _parameters([f for f in forms if f[:2] == ["ld", "param"]]),
        *_windows(),
        *_copies(),
    )


def space_of(parts: list[str]) -> str:
    """The state space that an opcode names, or ""."""
    return next((p for p in parts if p in (*SPACES, "const", "param")), "")


def _moves(forms: list[list[str]]) -> Iterator[Probe]:
    for parts in forms:
        kind = parts[-1]
        form = ".".join(parts)
        yield batch(
            [Statement(form, (kind,), (kind,), f"{form} {{r}}, {{a}};", lambda a: (a,))],
            sampled([kind], form, COUNT),
        )
    halves = (
        ".reg .b16 %lo, %hi; mov.b32 {{%lo, %hi}}, {a}; mov.b32 {r}, {{%hi, %lo}};",
        lambda a: (a >> 16 | (a & 0xFFFF) << 16,),
    )
    swapped = Statement("mov.b32", ("u32",), ("u32",), *halves)
    yield batch([swapped], sampled(["u32"], "pair", COUNT))


# --- loads and stores ----------------------------------------------------------------------


def _accesses(forms: list[list[str]]) -> Iterator[Probe]:
    groups: dict[tuple[str, str, bool], list[list[str]]] = {}
    for parts in forms:
        long = vector(parts) * width(parts[-1]) > 16  # which only newer GPUs have
        groups.setdefault((parts[0], space_of(parts), long), []).append(parts)
    for (family, space, _), members in groups.items():
        if space == "const":
            yield _constants(members)
            continue
        make = _store if family == "st" else _load
        where = space or "global"
        variables, address = SPACES[where]
        statements = [make(parts, f".{space}" if space else "") for parts in members]
        for start in range(0, len(statements), 16):
            yield batch(
                statements[start : start + 16],
                sampled(WORDS, f"{family}.{space}", COUNT),
                address.format(last=4),
                variables,
                scratch=REGION,
            )


def _fill(space: str) -> str:
    names = "abcd"
    return " ".join(f"st{space}.b64 [%x+{8 * i}], {{{names[i]}}};" for i in range(4))


def vector(parts: list[str]) -> int:
    """Words per thread."""
    return next((int(p[1:]) for p in parts if p in ("v2", "v4", "v8")), 1)


def elements(words: Bits, kind: str, count: int) -> list[int]:
    """The first elements of a region as bit patterns."""
    data = b"".join(int(w).to_bytes(8, "little") for w in words)
    size = width(kind)
    return [int.from_bytes(data[i * size : (i + 1) * size], "little") for i in range(count)]


def extended(value: int, kind: str) -> int:
    """The bits of a 32- or 64-bit register after a load of a type."""
    bits = 8 * width(kind)
    if kind[0] == "s" and bits < 32:
        return (value - (value >> (bits - 1) << bits)) & 0xFFFFFFFF
    return value


def braced(names: list[str]) -> str:
    """A vector operand in the text of a statement, where braces are doubled."""
    return f"{{{{{', '.join(names)}}}}}" if len(names) > 1 else names[0]


def _load(parts: list[str], space: str) -> Statement:
    form, kind, count = ".".join(parts), parts[-1], vector(parts)
    code = f"{_fill(space)} {form} {braced(places(count))}, [%x];"
    return Statement(
        form,
        WORDS,
        (_held(kind),) * count,
        code,
        lambda *words: tuple(extended(v, kind) for v in elements(words, kind, count)),
    )


def places(count: int) -> list[str]:
    """The first results in the text of a statement."""
    return [f"{{{letter}}}" for letter in LETTERS[:count]]


def _held(kind: str) -> str:
    return "u64" if width(kind) == 8 else "u32"


def _store(parts: list[str], space: str) -> Statement:
    """Ones in the whole region, then the store of the words' leading elements."""
    form, kind, count = ".".join(parts), parts[-1], vector(parts)
    size = width(kind)
    lines = [f"st{space}.b64 [%x+{8 * i}], -1;" for i in range(4)]
    names = []
    for index in range(count):
        word, shift = divmod(index * size, 8)
        name = f"%m{form.replace('.', '_').replace('::', '_')}_{index}"
        lines.append(f".reg .b64 {name}; shr.u64 {name}, {{{'abcd'[word]}}}, {8 * shift};")
        if size < 8:
            short = f"{name}s"
            lines.append(f".reg .{register(raw(kind))} {short};")
            lines.append(f"cvt.u{8 * max(size, 2)}.u64 {short}, {name};")
            name = short
        names.append(name)
    lines.append(f"{form} [%x], {braced(names)};")
    lines += [f"ld{space}.b64 {place}, [%x+{8 * i}];" for i, place in enumerate(places(4))]

    def want(*words: int) -> Bits:
        data = b"".join(int(w).to_bytes(8, "little") for w in words)[: size * count]
        region = data + b"\xff" * (REGION - len(data))
        return tuple(int.from_bytes(region[8 * i : 8 * i + 8], "little") for i in range(4))

    return Statement(form, WORDS, WORDS, " ".join(lines), want)


_DATA = bytes((37 * i + 11) % 256 for i in range(REGION))
_TABLE = f".const .align 32 .b8 table[{REGION}] = {{{', '.join(map(str, _DATA))}}};"


def _constants(forms: list[list[str]]) -> Probe:
    statements = [_fixed(parts, "[%x]") for parts in forms]
    inputs = sampled(["u32"], "const", COUNT)
    return batch(statements, inputs, "mov.u64 %x, table;", outside=_TABLE)


def _parameters(forms: list[list[str]]) -> Probe:
    statements = [_fixed(parts, "[bag]") for parts in forms]
    probe = batch(statements, sampled(["u32"], "param", COUNT))
    return Probe(probe.body, probe.inputs, probe.results, probe.count, bag=_DATA)


def _fixed(parts: list[str], address: str) -> Statement:
    form, kind, count = ".".join(parts), parts[-1], vector(parts)
    words = tuple(int.from_bytes(_DATA[8 * i : 8 * i + 8], "little") for i in range(4))
    wanted = tuple(extended(v, kind) for v in elements(words, kind, count))
    code = f"{form} {braced(places(count))}, {address};"
    return Statement(form, ("u32",), (_held(kind),) * count, code, lambda a: wanted)


# --- address windows and asynchronous copies -----------------------------------------------


def _windows() -> Iterator[Probe]:
    """A generic address made from each space, tested, used, and turned back."""
    for space, (variables, address) in SPACES.items():
        tests = ("global", "shared", "local")
        statements = [
            Statement(
                f"cvta.{space}.u64",
                WORDS,
                ("u64",),
                f"{_fill('.' + space)} cvta.{space}.u64 %at, %x; ld.b64 {{r}}, [%at+8];",
                lambda a, b, c, d: (b,),
            ),
            Statement(
                f"cvta.to.{space}.u64",
                WORDS,
                ("u64",),
                f"cvta.{space}.u64 %at, %x; cvta.to.{space}.u64 %at, %at; "
                f"st.{space}.b64 [%at+16], {{c}}; ld.{space}.b64 {{r}}, [%x+16];",
                lambda a, b, c, d: (c,),
            ),
        ]
        mine = space.split("::")[0]
        for test in (*tests, "shared::cta"):
            answer = int(test.split("::")[0] == mine)
            statements.append(
                Statement(
                    f"isspacep.{test}",
                    WORDS,
                    ("pred",),
                    f"cvta.{space}.u64 %at, %x; isspacep.{test} {{r}}, %at;",
                    lambda *words, answer=answer: (answer,),
                )
            )
        inputs = sampled(WORDS, space, COUNT)
        yield batch(statements, inputs, address.format(last=4), variables, scratch=REGION)
    code = "mov.u64 %x, table; cvta.const.u64 %at, %x; ld.b64 {r}, [%at];"
    back = "mov.u64 %x, table; cvta.const.u64 %at, %x; cvta.to.const.u64 %at, %at; "
    wanted = int.from_bytes(_DATA[:8], "little")
    yield batch(
        [
            Statement("cvta.const.u64", ("u32",), ("u64",), code, lambda a: (wanted,)),
            Statement(
                "cvta.to.const.u64",
                ("u32",),
                ("u64",),
                f"{back} ld.const.b64 {{r}}, [%at];",
                lambda a: (wanted,),
            ),
        ],
        sampled(["u32"], "const", COUNT),
        outside=_TABLE,
    )


def _copies() -> Iterator[Probe]:
    """cp.async of each size from the thread's words in global memory to shared memory."""
    variables, address = SPACES["shared"]
    filled = " ".join(f"st.global.b64 [%y+{8 * i}], {{{'abcd'[i]}}};" for i in range(4))
    lines = f"{address} .reg .b64 %y; ld.param.u64 %y, [p4]; mad.lo.u64 %y, %w, 32, %y;"
    sizes = [("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)]
    for wait in ("wait_all", "wait_group"):
        statements = []
        for level, size in sizes:
            for part in (None, 0, size // 2, size):
                for space in ("shared", "shared::cta"):
                    statements += _copied(level, size, part, space, wait, filled)
        inputs = sampled(WORDS, wait, COUNT)
        yield batch(statements, inputs, lines, variables, scratch=REGION)


def _copied(
    level: str, size: int, part: int | None, space: str, wait: str, filled: str
) -> list[Statement]:
    form = f"cp.async.{level}.{space}.global"
    some = "" if part is None else f", {part}"
    waiting = "cp.async.wait_all;" if wait == "wait_all" else "cp.async.commit_group;"
    waiting += "" if wait == "wait_all" else " cp.async.wait_group 0;"
    ones = "st.shared.b64 [%x], -1; st.shared.b64 [%x+8], -1;"
    read = "ld.shared.b64 {r}, [%x]; ld.shared.b64 {s}, [%x+8];"
    code = f"{filled} {ones} {form} [%x], [%y], {size}{some}; {waiting} {read}"

    def want(*words: int) -> Bits:
        data = b"".join(int(w).to_bytes(8, "little") for w in words)
        copied = data[: size if part is None else part]
        region = copied + b"\0" * (size - len(copied)) + b"\xff" * (16 - size)
        return int.from_bytes(region[:8], "little"), int.from_bytes(region[8:], "little")

    names = [form, f"cp.async.{wait}"]
    if wait == "wait_group":
        names.append("cp.async.commit_group")
    return [Statement(name, WORDS, ("u64", "u64"), code, want) for name in names]
