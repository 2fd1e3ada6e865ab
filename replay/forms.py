"""The opcode forms that replay supports: family, modifiers that change the result, types.

One line of `GRAMMAR` holds the families that share it, then groups of modifiers, then after `|` the
types in order. `?` marks a group that may be missing; `~` one that never changes a result (cache
hints, memory scopes) and so is no part of the form; `*` ends a prefix. An instruction that no line
matches is unknown to replay: a modifier is never ignored silently.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache, lru_cache

_NAMES = {
    "$int": "u16,s16,u32,s32,u64,s64",
    "$all": "u8,s8,u16,s16,u32,s32,u64,s64",
    "$round": "rn,rz,rm,rp",
    "$whole": "rni,rzi,rmi,rpi",
    "$compare": "eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan",
    "$word": "u8,s8,b8,u16,s16,b16,u32,s32,b32,f32,u64,s64,b64,f64",
    "$narrow": "u8,s8,b8,u16,s16,b16,u32,s32,b32,f32",
    "$hints": (
        "~weak,relaxed,acquire,release,acq_rel,volatile,mmio ~cta,cluster,gpu,sys ~nc "
        "~ca,cg,cs,lu,cv,wb,wt ~L1::* ~L2::cache_hint ~L2::evict_* ~L2::64B,L2::128B,L2::256B"
    ),
    "$shared": "shared,shared::cta",
    "$space": "global,shared,shared::cta",
}

GRAMMAR = """
add sub: | $int
add sub: sat | s32
add min max: | u16x2,s16x2
min max: relu | s16x2,s32
add sub: cc | u32,s32,u64,s64
addc subc: ?cc | u32,s32,u64,s64
mad: lo,hi cc | u32,s32,u64,s64
madc: lo,hi ?cc | u32,s32,u64,s64
mul mad: lo,hi | $int
mul mad: wide | u16,s16,u32,s32
div rem min max: | $int
sad: | $int
abs neg: | s16,s32,s64
dp4a: | u32,s32 u32,s32
add sub mul: ?$round ?ftz ?sat | f32
add sub mul: ?$round ?ftz | f32x2
add sub mul: ?$round | f64
add sub mul: ?rn ?ftz ?sat | f16,f16x2
add sub mul: ?rn | bf16,bf16x2
fma mad: $round ?ftz ?sat | f32
add sub: ?$round ?sat | f32 f16,bf16
fma: $round ?sat | f32 f16,bf16
fma: $round ?ftz | f32x2
fma mad: $round | f64
fma: rn ?ftz ?sat | f16,f16x2
fma: rn ?ftz relu | f16,f16x2
fma: rn ?relu | bf16,bf16x2
div: $round ?ftz | f32
div: approx,full ?ftz | f32
div: $round | f64
rcp sqrt: $round,approx ?ftz | f32
rcp sqrt: $round | f64
rcp rsqrt: approx ftz | f64
rsqrt: approx | f64
rsqrt sin cos lg2 ex2: approx ?ftz | f32
tanh: approx | f32,f16,f16x2,bf16,bf16x2
ex2: approx | f16,f16x2
ex2: approx ftz | bf16,bf16x2
min max: ?ftz ?NaN | f32,f16,f16x2
min max: ?ftz ?NaN xorsign abs | f32,f16,f16x2
min max: ?NaN | bf16,bf16x2
min max: ?NaN xorsign abs | bf16,bf16x2
min max: | f64
abs neg: ?ftz | f32,f16,f16x2
abs neg: | f64,bf16,bf16x2
copysign: | f32,f64
testp: finite,infinite,number,notanumber,normal,subnormal | f32,f64
setp: eq,ne,lt,le,gt,ge ?and,or,xor | $int
setp: lo,ls,hi,hs ?and,or,xor | u16,u32,u64
setp: eq,ne ?and,or,xor | b16,b32,b64
setp: $compare ?and,or,xor ?ftz | f32,f16,f16x2
setp: $compare ?and,or,xor | f64,bf16,bf16x2
set: eq,ne,lt,le,gt,ge ?and,or,xor | u32,s32,f32 $int
set: lo,ls,hi,hs ?and,or,xor | u32,s32,f32 u16,u32,u64
set: eq,ne ?and,or,xor | u32,s32,f32 b16,b32,b64
set: $compare ?and,or,xor ?ftz | u32,s32,f32 f32
set: $compare ?and,or,xor | u32,s32,f32 f64
selp: | b16,b32,b64,u16,s16,u32,s32,u64,s64,f32,f64
slct: | b16,b32,b64,u16,s16,u32,s32,u64,s64,f32,f64 s32
slct: ?ftz | b16,b32,b64,u16,s16,u32,s32,u64,s64,f32,f64 f32
and or xor not: | pred,b16,b32,b64
cnot shl: | b16,b32,b64
shr: | b16,b32,b64,u16,s16,u32,s32,u64,s64
shf: l,r clamp,wrap | b32
lop3 prmt: | b32
prmt: | b32 f4e,b4e,rc8,ecl,ecr,rc16
bfe: | u32,s32,u64,s64
bfi brev popc clz: | b32,b64
bfind: ?shiftamt | u32,s32,u64,s64
bmsk: clamp,wrap | b32
szext: clamp,wrap | u32,s32
cvt: | $all $all
cvt: sat | u8 s8,u16,s16,u32,s32,u64,s64
cvt: sat | s8 u8,u16,s16,u32,s32,u64,s64
cvt: sat | u16 s8,s16,u32,s32,u64,s64
cvt: sat | s16 u16,u32,s32,u64,s64
cvt: sat | u32 s8,s16,s32,u64,s64
cvt: sat | s32 u32,u64,s64
cvt: sat | u64 s8,s16,s32,s64
cvt: sat | s64 u64
cvt: $round | f32,f64 $all
cvt: $round ?sat | f16 $all
cvt: $round | bf16 $int
cvt: $whole ?sat | $all f16,f64
cvt: $whole ?ftz ?sat | $all f32
cvt: $whole | $int bf16
cvt: ?sat | f32,f64 f16
cvt: ?ftz ?sat | f64,f32 f32
cvt: ?sat | f64 f64
cvt: ?sat | f16 f16
cvt: | f32,f64 bf16
cvt: $whole ?sat | f16 f16
cvt: $whole ?ftz ?sat | f32 f32
cvt: $whole ?sat | f64 f64
cvt: $round ?ftz ?sat | f32 f64
cvt: $round ?ftz ?sat | f16 f32
cvt: $round ?sat | f16 f64
cvt: rn,rz ?satfinite ?relu | f16,bf16 f32
cvt: rn,rz ?satfinite ?relu | f16x2,bf16x2 f32
cvt: $round | bf16 f16,f64
cvt: $round | f16 bf16
cvt: rna,rn,rz | tf32 f32
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
membar fence prefetch prefetchu griddepcontrol nanosleep setmaxnreg pmevent: ~*
discard applypriority: ~*
"""


@dataclass(frozen=True)
class Group:
    """Alternatives of which an opcode has one."""

    names: tuple[str, ...]
    optional: bool
    hint: bool

    def takes(self, part: str) -> bool:
        """Whether a modifier is one of the alternatives."""
        return any(part == n or (n[-1] == "*" and part.startswith(n[:-1])) for n in self.names)


@dataclass(frozen=True)
class Syntax:
    """One line of the grammar for one family."""

    family: str
    groups: tuple[Group, ...]
    types: tuple[tuple[str, ...], ...]

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


@cache
def table() -> dict[str, tuple[Syntax, ...]]:
    """The lines of the grammar by family."""
    text = GRAMMAR
    for name, meaning in _NAMES.items():
        text = text.replace(name, meaning)
    found: dict[str, list[Syntax]] = {}
    for line in text.strip().splitlines():
        families, _, rest = line.partition(":")
        modifiers, _, types = rest.partition("|")
        groups = tuple(_group(word) for word in modifiers.split())
        kinds = tuple(tuple(word.split(",")) for word in types.split())
        for family in families.split():
            found.setdefault(family, []).append(Syntax(family, groups, kinds))
    return {family: tuple(lines) for family, lines in found.items()}


@lru_cache(4096)
def form_of(opcode: str) -> str | None:
    """The form of an opcode, or None if replay does not support it."""
    family, *parts = opcode.split(".")
    for line in table().get(family, ()):
        form = line.form(tuple(parts))
        if form is not None:
            return form
    return None


@cache
def supported() -> tuple[str, ...]:
    """Every opcode form that replay supports."""
    forms = [form for lines in table().values() for line in lines for form in line.forms()]
    return tuple(dict.fromkeys(f for f in forms if form_of(f) == f))
