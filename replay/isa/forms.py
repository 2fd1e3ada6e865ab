"""The opcode forms that replay supports: family, modifiers that change the result, types.

One line holds the families that share it, then groups of modifiers, then after `|` the types in
order; in the `FORMS` of a module of pure instructions it stands beside what resolves it. `?` marks
a group that may be missing; `~` one that never changes a result (cache hints, memory scopes) and
so is no part of the form; `*` ends a prefix. An instruction that no line matches is unknown to
replay: a modifier is never ignored silently.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

from twinstep.replay.errors import UnknownInstruction
from twinstep.replay.isa import (
    approximate,
    bitwise,
    compare,
    convert,
    eight_bit,
    floating,
    half,
    integer,
    mixed_precision,
)
from twinstep.replay.isa.operations import Operation, Resolver

NO_EFFECT = (
    *("membar", "fence", "prefetch", "prefetchu", "griddepcontrol", "nanosleep", "setmaxnreg"),
    *("pmevent", "discard", "applypriority"),
)
"""Families that change no value here: fences, prefetches, hints."""

_HINTS = (
    "~weak,relaxed,acquire,release,acq_rel,volatile,mmio ~cta,cluster,gpu,sys ~nc "
    "~ca,cg,cs,lu,cv,wb,wt ~L1::* ~L2::cache_hint ~L2::evict_* ~L2::64B,L2::128B,L2::256B"
)
_NAMES = {
    "$int": "u16,s16,u32,s32,u64,s64",
    "$all": "u8,s8,u16,s16,u32,s32,u64,s64",
    "$round": "rn,rz,rm,rp",
    "$whole": "rni,rzi,rmi,rpi",
    "$compare": "eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan",
    "$word": "u8,s8,b8,u16,s16,b16,u32,s32,b32,f32,u64,s64,b64,f64",
    "$narrow": "u8,s8,b8,u16,s16,b16,u32,s32,b32,f32",
    "$hints": _HINTS,
    "$no_effect": " ".join(NO_EFFECT),
    "$shared": "shared,shared::cta",
    "$space": "global,shared,shared::cta",
}

GRAMMAR = """
mov: | pred,b16,u16,s16,b32,u32,s32,f32,b64,u64,s64,f64
ld: $hints ?global,const,shared,shared::cta,local,param ?v2 | $word
ld: $hints ?global,const,shared,shared::cta,local,param v4 | $narrow
ldu: $hints ?global ?v2 | $word
ldu: $hints ?global v4 | $narrow
st: $hints ?global,shared,shared::cta,local,param ?v2 | $word
st: $hints ?global,shared,shared::cta,local,param v4 | $narrow
ld st: $hints global v4 | u64,s64,b64,f64
ld st: $hints global v8 | u32,s32,b32,f32
cvta: ?to global,const,shared,shared::cta,local | u64
isspacep: global,shared,shared::cta,local
atom red: $hints ?$space and,or,xor | b32,b64
atom: $hints ?$space exch | b32,b64
atom: $hints ?$space cas | b16,b32,b64
atom red: $hints ?$space add | u32,s32,u64
atom red: $hints ?$space min,max | u32,s32,u64,s64
atom red: $hints ?$space inc,dec | u32
atom red: $hints ?$space add | f32,f64
atom red: $hints ?$space add noftz | f16,bf16,f16x2,bf16x2
atom red: $hints global add v2,v4 | f32
atom red: $hints global add,min,max noftz v2,v4,v8 | f16,bf16
atom red: $hints global add,min,max noftz v2,v4 | f16x2,bf16x2
cp: async ca,cg $shared global ~L2::cache_hint ~L2::64B,L2::128B,L2::256B
cp: async commit_group,wait_group,wait_all
ldmatrix stmatrix: sync aligned m8n8 x1,x2,x4 ?trans $shared | b16
shfl: sync up,down,bfly,idx | b32
vote: sync any,all,uni | pred
vote: sync ballot | b32
activemask: | b32
match: any,all sync | b32,b64
redux: sync add,min,max | u32,s32
redux: sync and,or,xor | b32
redux: sync min,max ?NaN | f32
elect: sync
bar: ?cta sync
bar: warp sync
bar: ?cta red popc | u32
bar: ?cta red and,or | pred
barrier: ?cta sync ?aligned
barrier: ?cta red popc ?aligned | u32
barrier: ?cta red and,or ?aligned | pred
createpolicy: ~*
bra ret call: ~uni
brx: idx ~uni
exit trap brkpt:
$no_effect: ~*
"""
"""Forms that touch memory, other threads or the program counter."""

TABLES = (
    *(integer, bitwise, floating, half, mixed_precision, approximate, compare),
    *(convert, eight_bit),
)
"""Modules whose `FORMS` are pure: they compute, and nothing else."""


@dataclass(frozen=True)
class Group:
    """Alternatives of which an opcode has one."""

    names: tuple[str, ...]
    optional: bool
    hint: bool

    def takes(self, part: str) -> bool:
        """True if a modifier is one of the alternatives."""
        return any(part == n or (n[-1] == "*" and part.startswith(n[:-1])) for n in self.names)


@dataclass(frozen=True)
class Syntax:
    """One line of the grammar for one family."""

    family: str
    groups: tuple[Group, ...]
    types: tuple[tuple[str, ...], ...]
    resolver: Resolver | None = None

    def form(self, parts: tuple[str, ...]) -> str | None:
        """The form of an opcode (its hints left out), or None if it does not match."""
        split = len(parts) - len(self.types)
        rest, types = list(parts[:split]), parts[split:]
        if split < 0 or not all(t in known for t, known in zip(types, self.types, strict=True)):
            return None
        kept = []
        for group in self.groups:
            if group.names == ("*",):
                return self.family
            found = next((part for part in rest if group.takes(part)), None)
            if found is None:
                if not group.optional:
                    return None
                continue
            rest.remove(found)
            if not group.hint:
                kept.append(found)
        return None if rest else ".".join((self.family, *kept, *types))

    def forms(self) -> list[str]:
        """All forms of this line."""
        choices = [
            ("", *group.names) if group.optional else group.names
            for group in self.groups
            if not group.hint
        ]
        return [
            ".".join((self.family, *(part for part in chosen if part)))
            for chosen in itertools.product(*choices, *self.types)
        ]


def _group(text: str) -> Group:
    names = tuple(text.lstrip("~?").split(","))
    return Group(names, optional=text[0] in "~?", hint=text[0] == "~")


_HINT_GROUPS = tuple(_group(word) for word in _HINTS.split())


def without_hints(opcode: str) -> str:
    """An opcode without cache hints, memory orders and scopes."""
    family, *parts = opcode.split(".")
    kept = (part for part in parts if not any(group.takes(part) for group in _HINT_GROUPS))
    return ".".join((family, *kept))


def _lines(text: str, resolver: Resolver | None = None) -> Iterator[Syntax]:
    for name, meaning in _NAMES.items():
        text = text.replace(name, meaning)
    for line in text.strip().splitlines():
        families, _, rest = line.partition(":")
        modifiers, _, types = rest.partition("|")
        groups = tuple(_group(word) for word in modifiers.split())
        kinds = tuple(tuple(word.split(",")) for word in types.split())
        for family in families.split():
            yield Syntax(family, groups, kinds, resolver)


@cache
def table() -> dict[str, list[Syntax]]:
    """The lines of the grammar by family."""
    found: dict[str, list[Syntax]] = {}
    pure = (row for module in TABLES for row in module.FORMS.items())
    rows = itertools.chain(*(_lines(text, resolver) for text, resolver in pure), _lines(GRAMMAR))
    for line in rows:
        found.setdefault(line.family, []).append(line)
    return found


@cache
def pure_families() -> frozenset[str]:
    """Families whose instructions compute, and nothing else."""
    return frozenset(family for family, lines in table().items() if lines[0].resolver)


def _matched(opcode: str) -> tuple[Syntax, str] | None:
    family, *parts = opcode.split(".")
    for line in table().get(family, ()):
        form = line.form(tuple(parts))
        if form is not None:
            return line, form
    return None


@lru_cache(4096)
def form_of(opcode: str) -> str | None:
    """The form of an opcode, or None if replay does not support it."""
    found = _matched(opcode)
    return found[1] if found else None


@lru_cache(4096)
def resolve(opcode: str) -> Operation | None:
    """The operation of an opcode with its modifiers; None if computing is not all that it does.

    Raises:
        UnknownInstruction: if replay does not support it.
    """
    found = _matched(opcode)
    if found is None:
        raise UnknownInstruction(f"Instruction {opcode} is unknown to replay.")
    resolver = found[0].resolver
    return resolver(tuple(opcode.split("."))) if resolver else None


@cache
def supported() -> tuple[str, ...]:
    """Every opcode form that replay supports."""
    forms = [form for lines in table().values() for line in lines for form in line.forms()]
    return tuple(dict.fromkeys(f for f in forms if form_of(f) == f))
