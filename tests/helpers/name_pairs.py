"""Pairs of PTX fragments on the same operands: with different bits for some values, and with equal.

Operands: `%a %b %c` float32, `%x %y %z` float64, `%h %k %l` 16 bits, `%w` a pair of 16 bits. The
result of a fragment is the first register of its last instruction. `%f` `%d` `%s` `%r` `%p` are
registers of float32, float64, 16 bits, 32 bits and predicates.
"""

from itertools import product

MODES = ("rz", "rm", "rp")


def _modes() -> list[tuple[str, str]]:
    """Another rounding mode."""
    rows = []
    for mode in MODES:
        for op, args in (("add", "%a, %b"), ("mul", "%a, %b"), ("div", "%a, %b")):
            rows.append((f"{op}.rn.f32 %f0, {args}", f"{op}.{mode}.f32 %f0, {args}"))
        rows.append(("fma.rn.f32 %f0, %a, %b, %c", f"fma.{mode}.f32 %f0, %a, %b, %c"))
        rows.append(("sqrt.rn.f32 %f0, %a", f"sqrt.{mode}.f32 %f0, %a"))
        rows.append(("cvt.rn.f32.f64 %f0, %x", f"cvt.{mode}.f32.f64 %f0, %x"))
        rows.append(("add.rn.f64 %d0, %x, %y", f"add.{mode}.f64 %d0, %x, %y"))
        rows.append(("div.rn.f64 %d0, %x, %y", f"div.{mode}.f64 %d0, %x, %y"))
    rows.append(("cvt.rn.f16.f32 %s0, %a", "cvt.rz.f16.f32 %s0, %a"))
    rows.append(("cvt.rn.bf16.f32 %s0, %a", "cvt.rz.bf16.f32 %s0, %a"))
    rows.append(("cvt.rni.f32.f32 %f0, %a", "cvt.rzi.f32.f32 %f0, %a"))
    return rows


def _flushed() -> list[tuple[str, str]]:
    """Subnormal numbers flushed to zero."""
    two = [("add.rn", "%a, %b"), ("sub.rn", "%a, %b"), ("mul.rn", "%a, %b"), ("div.rn", "%a, %b")]
    one = [("sqrt.rn", "%a"), ("abs", "%a"), ("neg", "%a"), ("fma.rn", "%a, %b, %c")]
    least = [("min", "%a, %b"), ("max", "%a, %b")]
    return [(f"{op}.f32 %f0, {a}", f"{op}.ftz.f32 %f0, {a}") for op, a in two + one + least] + [
        ("setp.lt.f32 %p0, %a, %b", "setp.lt.ftz.f32 %p0, %a, %b"),
        ("cvt.f64.f32 %d0, %a", "cvt.ftz.f64.f32 %d0, %a"),
    ]


def _contracted() -> list[tuple[str, str]]:
    """A product and a sum, fused or not."""
    rows = []
    for kind, (a, b, c), t in (
        ("f32", ("%a", "%b", "%c"), "%f"),
        ("f64", ("%x", "%y", "%z"), "%d"),
    ):
        apart = f"mul.rn.{kind} {t}1, {a}, {b}; "
        rows += [
            (apart + f"add.rn.{kind} {t}0, {t}1, {c}", f"fma.rn.{kind} {t}0, {a}, {b}, {c}"),
            (
                apart + f"sub.rn.{kind} {t}0, {c}, {t}1",
                f"neg.{kind} {t}1, {a}; fma.rn.{kind} {t}0, {t}1, {b}, {c}",
            ),
            (
                apart + f"mul.rn.{kind} {t}2, {a}, {c}; add.rn.{kind} {t}0, {t}1, {t}2",
                apart + f"fma.rn.{kind} {t}0, {a}, {c}, {t}1",
            ),
            (
                apart + f"fma.rn.{kind} {t}0, {a}, {c}, {t}1",
                f"mul.rn.{kind} {t}1, {a}, {c}; fma.rn.{kind} {t}0, {a}, {b}, {t}1",
            ),
        ]
    for kind in ("f16", "bf16"):
        rows.append(
            (
                f"mul.rn.{kind} %s1, %h, %k; add.rn.{kind} %s0, %s1, %l",
                f"fma.rn.{kind} %s0, %h, %k, %l",
            )
        )
    return rows


def _ordered() -> list[tuple[str, str]]:
    """The same numbers in another order."""
    rows = []
    for (kind, (a, b, c), t), op in product(
        (("f32", ("%a", "%b", "%c"), "%f"), ("f64", ("%x", "%y", "%z"), "%d")), ("add", "mul")
    ):
        first = f"{op}.rn.{kind} {t}1, {a}, {b}; {op}.rn.{kind} {t}0, {t}1, {c}"
        rows.append((first, f"{op}.rn.{kind} {t}1, {b}, {c}; {op}.rn.{kind} {t}0, {a}, {t}1"))
        rows.append((first, f"{op}.rn.{kind} {t}1, {a}, {c}; {op}.rn.{kind} {t}0, {t}1, {b}"))
    for op in ("sub", "div"):
        rows.append((f"{op}.rn.f32 %f0, %a, %b", f"{op}.rn.f32 %f0, %b, %a"))
        rows.append((f"{op}.rn.f64 %d0, %x, %y", f"{op}.rn.f64 %d0, %y, %x"))
        again = f"{op}.rn.f32 %f1, %b, %c; {op}.rn.f32 %f0, %a, %f1"
        rows.append((f"{op}.rn.f32 %f1, %a, %b; {op}.rn.f32 %f0, %f1, %c", again))
    rows.append(("fma.rn.f32 %f0, %a, %b, %c", "fma.rn.f32 %f0, %a, %c, %b"))
    rows.append(("fma.rn.f32 %f0, %a, %b, %c", "fma.rn.f32 %f0, %c, %b, %a"))
    # (a + b) + (b + c), unrolled another way.
    rows.append(
        (
            "add.f32 %f1, %a, %b; add.f32 %f2, %b, %c; add.f32 %f0, %f1, %f2",
            "add.f32 %f1, %a, %b; add.f32 %f1, %f1, %b; add.f32 %f0, %f1, %c",
        )
    )
    return rows


AT_H = "ld.param.u64 %q1, [h]; "

DIFFERENT: list[tuple[str, str]] = [
    *_modes(),
    *_flushed(),
    *_contracted(),
    *_ordered(),
    # Loads that extend.
    (f"{AT_H}ld.global.s16 %r0, [%q1]", f"{AT_H}ld.global.u16 %r0, [%q1]"),
    ("mov.b32 %r1, {%h, %k}; shr.s32 %r0, %r1, 16", "mov.b32 %r1, {%h, %k}; shr.u32 %r0, %r1, 16"),
    # Division and roots by reciprocals.
    ("div.rn.f32 %f0, %a, %b", "rcp.rn.f32 %f1, %b; mul.rn.f32 %f0, %a, %f1"),
    ("div.rn.f32 %f0, %a, 0f40400000", "mul.rn.f32 %f0, %a, 0f3EAAAAAB"),
    ("div.rn.f64 %d0, %x, %y", "rcp.rn.f64 %d1, %y; mul.rn.f64 %d0, %x, %d1"),
    ("sqrt.rn.f32 %f1, %a; rcp.rn.f32 %f0, %f1", "rcp.rn.f32 %f1, %a; sqrt.rn.f32 %f0, %f1"),
    (
        "sqrt.rn.f32 %f1, %a; div.rn.f32 %f0, %f1, %b",
        "rcp.rn.f32 %f2, %b; sqrt.rn.f32 %f1, %a; mul.rn.f32 %f0, %f1, %f2",
    ),
    (
        "sub.f32 %f1, %b, %a; fma.rn.f32 %f0, %c, %f1, %a",
        "sub.f32 %f1, 0f3F800000, %c; mul.f32 %f2, %c, %b; fma.rn.f32 %f0, %f1, %a, %f2",
    ),
    (
        "mul.f32 %f1, %a, %b; sub.f32 %f0, %a, %f1",
        "sub.f32 %f1, 0f3F800000, %b; mul.f32 %f0, %a, %f1",
    ),
    # Detours through wider formats that round twice, or once where it should be twice.
    (
        "fma.rn.f32 %f0, %a, %b, %c",
        "cvt.f64.f32 %d1, %a; cvt.f64.f32 %d2, %b; cvt.f64.f32 %d3, %c; "
        "fma.rn.f64 %d0, %d1, %d2, %d3; cvt.rn.f32.f64 %f0, %d0",
    ),
    (
        "mul.f32 %f1, %a, %b; add.f32 %f0, %f1, %c",
        "cvt.f64.f32 %d1, %a; cvt.f64.f32 %d2, %b; cvt.f64.f32 %d3, %c; "
        "mul.f64 %d1, %d1, %d2; add.f64 %d0, %d1, %d3; cvt.rn.f32.f64 %f0, %d0",
    ),
    (
        "add.f32 %f1, %a, %b; add.f32 %f0, %f1, %c",
        "cvt.f64.f32 %d1, %a; cvt.f64.f32 %d2, %b; cvt.f64.f32 %d3, %c; "
        "add.f64 %d1, %d1, %d2; add.f64 %d0, %d1, %d3; cvt.rn.f32.f64 %f0, %d0",
    ),
    ("cvt.rn.f16.f64 %s0, %x", "cvt.rn.f32.f64 %f1, %x; cvt.rn.f16.f32 %s0, %f1"),
    ("cvt.rn.bf16.f64 %s0, %x", "cvt.rn.f32.f64 %f1, %x; cvt.rn.bf16.f32 %s0, %f1"),
    ("mov.f32 %f0, %a", "cvt.rn.bf16.f32 %s1, %a; cvt.f32.bf16 %f0, %s1"),
    ("mov.f32 %f0, %a", "cvt.rn.f16.f32 %s1, %a; cvt.f32.f16 %f0, %s1"),
    (
        "cvt.rn.bf16.f32 %s0, %a",
        "cvt.rn.f16.f32 %s1, %a; cvt.f32.f16 %f1, %s1; cvt.rn.bf16.f32 %s0, %f1",
    ),
    ("cvt.rn.f16.f32 %s0, %a", "cvt.rn.bf16.f32 %s0, %a"),
    ("cvt.f32.f16 %f0, %h", "cvt.f32.bf16 %f0, %h"),
    ("add.rn.f16 %s0, %h, %k", "add.rn.bf16 %s0, %h, %k"),
    # Rounding to bf16 by integers that forgets ties or adds too much.
    ("cvt.rn.bf16.f32 %s0, %a", "mov.b32 %r1, %a; shr.u32 %r1, %r1, 16; cvt.u16.u32 %s0, %r1"),
    (
        "cvt.rn.bf16.f32 %s0, %a",
        "mov.b32 %r1, %a; add.u32 %r1, %r1, 32768; shr.u32 %r1, %r1, 16; cvt.u16.u32 %s0, %r1",
    ),
    # Packing.
    ("mov.b32 %r0, {%h, %k}", "mov.b32 %r0, {%k, %h}"),
    ("mov.b32 {%s0, %s1}, %w; mov.b16 %s0, %s0", "mov.b32 {%s1, %s2}, %w; mov.b16 %s0, %s2"),
    ("cvt.rn.bf16x2.f32 %r0, %a, %b", "cvt.rn.bf16x2.f32 %r0, %b, %a"),
    ("cvt.rn.bf16x2.f32 %r0, %a, %b", "cvt.rn.f16x2.f32 %r0, %a, %b"),
    ("and.b32 %r0, %w, 0xFFFF0000", "shl.b32 %r0, %w, 16"),
    ("prmt.b32 %r0, %w, 0, 0x1054", "prmt.b32 %r0, %w, 0, 0x3254"),
    ("shr.u32 %r0, %w, 16", "shr.s32 %r0, %w, 16"),
    ("cvt.u32.u16 %r0, %h", "cvt.s32.s16 %r0, %h"),
    (
        "mov.b32 %r0, %a; and.b32 %r0, %r0, 0x7FFFFFFF",
        "mov.b32 %r0, %a; and.b32 %r0, %r0, 0x7FFFFFFE",
    ),
    (
        "mov.b32 %r0, %a; xor.b32 %r0, %r0, 0x80000000",
        "mov.b32 %r0, %a; or.b32 %r0, %r0, 0x80000000",
    ),
    ("and.b32 %r0, %w, 0x7FFF7FFF", "and.b32 %r0, %w, 0x7FFFFFFF"),
    ("add.rn.bf16x2 %r0, %w, %w", "add.rn.f16x2 %r0, %w, %w"),
    # Minima, and what a NaN or a zero does.
    ("min.f32 %f0, %a, %b", "min.NaN.f32 %f0, %a, %b"),
    ("max.f32 %f0, %a, %b", "max.NaN.f32 %f0, %a, %b"),
    ("min.f32 %f0, %a, %b", "max.f32 %f0, %a, %b"),
    ("min.f32 %f0, %a, %b", "setp.lt.f32 %p1, %a, %b; selp.f32 %f0, %a, %b, %p1"),
    ("max.f32 %f0, %a, %b", "setp.gt.f32 %p1, %b, %a; selp.f32 %f0, %b, %a, %p1"),
    (
        "setp.lt.f32 %p1, %a, %b; selp.f32 %f0, %a, %b, %p1",
        "setp.lt.f32 %p1, %b, %a; selp.f32 %f0, %b, %a, %p1",
    ),
    ("setp.lt.f32 %p0, %a, %b", "setp.ltu.f32 %p0, %a, %b"),
    ("setp.eq.f32 %p0, %a, %b", "setp.equ.f32 %p0, %a, %b"),
    ("setp.ne.f32 %p0, %a, %b", "setp.neu.f32 %p0, %a, %b"),
    ("setp.le.f32 %p0, %a, %b", "setp.lt.f32 %p0, %a, %b"),
    ("setp.gt.f32 %p0, %a, %b", "setp.leu.f32 %p1, %a, %b; mov.pred %p0, %p1"),
    ("setp.ge.f32 %p0, %a, %b", "setp.lt.f32 %p1, %a, %b; not.pred %p0, %p1"),
    ("setp.num.f32 %p0, %a, %b", "setp.eq.f32 %p0, %a, %a"),
    ("setp.nan.f32 %p0, %a, %b", "setp.neu.f32 %p0, %a, %b"),
    ("setp.eq.f32 %p0, %a, 0f00000000", "mov.b32 %r1, %a; setp.eq.u32 %p0, %r1, 0"),
    (
        "setp.gt.f32 %p1, %a, 0f41200000; selp.f32 %f0, %b, %c, %p1",
        "setp.ge.f32 %p1, %a, 0f41200000; selp.f32 %f0, %b, %c, %p1",
    ),
    (
        "setp.lt.f32 %p1, %a, 0f3F000000; selp.f32 %f0, %b, %c, %p1",
        "setp.lt.f32 %p1, %a, 0f3F000001; selp.f32 %f0, %b, %c, %p1",
    ),
    (
        "setp.lt.f32 %p1, %a, %b; selp.f32 %f0, %b, %c, %p1",
        "setp.lt.f32 %p1, %a, %b; selp.f32 %f0, %c, %b, %p1",
    ),
    (
        "setp.lt.f32 %p1, %a, %b; setp.lt.f32 %p2, %b, %c; and.pred %p0, %p1, %p2",
        "setp.lt.f32 %p1, %a, %b; setp.lt.f32 %p2, %b, %c; or.pred %p0, %p1, %p2",
    ),
    (
        "setp.lt.f32 %p1, %a, %b; setp.lt.and.f32 %p0, %b, %c, %p1",
        "setp.lt.f32 %p1, %a, %b; setp.lt.xor.f32 %p0, %b, %c, %p1",
    ),
    # Zeros and other neutral elements that are none.
    ("mov.f32 %f0, %a", "add.f32 %f0, %a, 0f00000000"),
    ("mov.f32 %f0, %a", "mul.f32 %f0, %a, 0f3F800001"),
    *[("mov.f32 %f0, %a", f"{op}.rn.ftz.f32 %f0, %a, %b") for op in ("mul", "div")],
    ("mov.f32 %f0, 0f00000000", "sub.f32 %f0, %a, %a"),
    ("mov.f32 %f0, 0f00000000", "mul.f32 %f0, %a, 0f00000000"),
    ("neg.f32 %f0, %a", "sub.f32 %f0, 0f00000000, %a"),
    ("mov.f32 %f0, 0f3F800000", "div.rn.f32 %f0, %a, %a"),
    ("mov.f32 %f0, %a", "mul.f32 %f1, %a, %a; sqrt.rn.f32 %f0, %f1"),
    ("abs.f32 %f0, %a", "mul.f32 %f1, %a, %a; sqrt.rn.f32 %f0, %f1"),
    ("mov.f32 %f0, %a", "add.f32 %f1, %a, %b; sub.f32 %f0, %f1, %b"),
    ("fma.rn.f32 %f0, %a, %b, 0f00000000", "mul.f32 %f0, %a, %b"),
    ("mul.f32 %f0, %a, 0f3F7FBE77", "mul.f32 %f0, %a, 0f3F7FBE76"),
    ("mul.f64 %d0, %x, 0d3FEFF7CED916872B", "mul.f64 %d0, %x, 0d3FEFF7CEE0000000"),
    (
        "sub.f64 %d1, 0d3FF0000000000000, %x; cvt.rn.f32.f64 %f0, %d1",
        "cvt.rn.f32.f64 %f1, %x; sub.f32 %f0, 0f3F800000, %f1",
    ),
    (
        "mul.f64 %d1, %x, %y; cvt.rn.f32.f64 %f0, %d1",
        "cvt.rn.f32.f64 %f1, %x; cvt.rn.f32.f64 %f2, %y; mul.f32 %f0, %f1, %f2",
    ),
    ("add.sat.f32 %f0, %a, %b", "add.f32 %f0, %a, %b"),
    ("copysign.f32 %f0, %a, %b", "copysign.f32 %f0, %b, %a"),
]
"""Different bits for some values."""

EQUAL: list[tuple[str, str]] = [
    (f"{AT_H}ld.global.s16 %r0, [%q1]", "cvt.s32.s16 %r0, %h"),
    ("mov.b32 %r1, {%h, %k}; shr.s32 %r0, %r1, 16", "cvt.s32.s16 %r0, %k"),
    *[
        (f"{op}.rn.{kind} {t}0, {a}, {b}", f"{op}.rn.{kind} {t}0, {b}, {a}")
        for op in ("add", "mul")
        for kind, a, b, t in (
            ("f32", "%a", "%b", "%f"),
            ("f64", "%x", "%y", "%d"),
            ("f16", "%h", "%k", "%s"),
            ("bf16", "%h", "%k", "%s"),
        )
    ],
    ("fma.rn.f32 %f0, %a, %b, %c", "fma.rn.f32 %f0, %b, %a, %c"),
    ("fma.rn.f64 %d0, %x, %y, %z", "fma.rn.f64 %d0, %y, %x, %z"),
    ("add.f32 %f0, %a, %b", "add.rn.f32 %f0, %a, %b"),
    ("mad.rn.f32 %f0, %a, %b, %c", "fma.rn.f32 %f0, %a, %b, %c"),
    *[
        (
            f"{op}.rn.f32 %f0, %a, %b",
            f"cvt.f64.f32 %d1, %a; cvt.f64.f32 %d2, %b; {op}.rn.f64 %d0, %d1, %d2; "
            "cvt.rn.f32.f64 %f0, %d0",
        )
        for op in ("add", "sub", "mul", "div")
    ],
    ("sqrt.rn.f32 %f0, %a", "cvt.f64.f32 %d1, %a; sqrt.rn.f64 %d1, %d1; cvt.rn.f32.f64 %f0, %d1"),
    ("cvt.f64.f32 %d1, %a; cvt.rn.f32.f64 %f0, %d1", "mov.f32 %f0, %a"),
    ("cvt.f32.f16 %f1, %h; cvt.rn.f16.f32 %s0, %f1", "mov.b16 %s0, %h"),
    ("cvt.f32.bf16 %f1, %h; cvt.rn.bf16.f32 %s0, %f1", "mov.b16 %s0, %h"),
    ("cvt.f32.bf16 %f0, %h", "mov.b16 %s1, 0; mov.b32 %r1, {%s1, %h}; mov.b32 %f0, %r1"),
    ("cvt.f32.bf16 %f0, %h", "cvt.u32.u16 %r1, %h; shl.b32 %r1, %r1, 16; mov.b32 %f0, %r1"),
    ("cvt.f64.f16 %d0, %h", "cvt.f32.f16 %f1, %h; cvt.f64.f32 %d0, %f1"),
    ("cvt.f64.bf16 %d0, %h", "cvt.f32.bf16 %f1, %h; cvt.f64.f32 %d0, %f1"),
    *[
        (
            f"{op}.rn.{kind} %s0, %h, %k",
            f"cvt.f32.{kind} %f1, %h; cvt.f32.{kind} %f2, %k; {op}.f32 %f1, %f1, %f2; "
            f"cvt.rn.{kind}.f32 %s0, %f1",
        )
        for op, kind in (("add", "f16"), ("sub", "f16"), ("mul", "f16"), ("add", "bf16"))
    ],
    ("abs.f32 %f0, %a", "mov.b32 %r1, %a; and.b32 %r1, %r1, 0x7FFFFFFF; mov.b32 %f0, %r1"),
    ("neg.f32 %f0, %a", "mov.b32 %r1, %a; xor.b32 %r1, %r1, 0x80000000; mov.b32 %f0, %r1"),
    ("neg.f32 %f1, %a; neg.f32 %f0, %f1", "mov.f32 %f0, %a"),
    ("abs.f32 %f1, %a; abs.f32 %f0, %f1", "abs.f32 %f0, %a"),
    (
        "mov.b32 %r0, {%h, %k}; and.b32 %r0, %r0, 0x7FFF7FFF",
        "abs.bf16 %s1, %h; abs.f16 %s2, %k; mov.b32 %r0, {%s1, %s2}",
    ),
    ("mov.b32 %r1, {%h, %k}; mov.b32 {%s0, %s1}, %r1; mov.b16 %s0, %s0", "mov.b16 %s0, %h"),
    ("mov.b32 %r1, {%h, %k}; shr.u32 %r1, %r1, 16; cvt.u16.u32 %s0, %r1", "mov.b16 %s0, %k"),
    ("prmt.b32 %r0, %w, 0, 0x1054", "shl.b32 %r0, %w, 16"),
    ("and.b32 %r0, %w, 0xFFFF0000", "shr.u32 %r1, %w, 16; shl.b32 %r0, %r1, 16"),
    ("prmt.b32 %r0, %w, %w, 0x1032", "mov.b32 {%s1, %s2}, %w; mov.b32 %r0, {%s2, %s1}"),
    (
        "shl.b32 %r1, %w, 16; and.b32 %r2, %w, 0xFFFF0000; "
        "shr.u32 %r1, %r1, 16; or.b32 %r0, %r1, %r2",
        "mov.b32 %r0, %w",
    ),
    ("and.b32 %r0, %w, 0xFFFFFFFF", "or.b32 %r0, %w, 0"),
    (
        "cvt.rn.bf16x2.f32 %r0, %a, %b",
        "cvt.rn.bf16.f32 %s1, %b; cvt.rn.bf16.f32 %s2, %a; mov.b32 %r0, {%s1, %s2}",
    ),
    (
        "add.rn.bf16x2 %r0, %w, %w",
        "mov.b32 {%s1, %s2}, %w; add.rn.bf16 %s1, %s1, %s1; add.rn.bf16 %s2, %s2, %s2; "
        "mov.b32 %r0, {%s1, %s2}",
    ),
    (
        "fma.rn.f16x2 %r0, %w, %w, %w",
        "mov.b32 {%s1, %s2}, %w; fma.rn.f16 %s1, %s1, %s1, %s1; fma.rn.f16 %s2, %s2, %s2, %s2; "
        "mov.b32 %r0, {%s1, %s2}",
    ),
    ("setp.gt.f32 %p0, %a, %b", "setp.lt.f32 %p0, %b, %a"),
    ("setp.ge.f32 %p0, %a, %b", "setp.le.f32 %p0, %b, %a"),
    ("setp.geu.f32 %p0, %a, %b", "setp.lt.f32 %p1, %a, %b; not.pred %p0, %p1"),
    ("setp.neu.f32 %p0, %a, %b", "setp.eq.f32 %p1, %b, %a; not.pred %p0, %p1"),
    ("setp.nan.f32 %p0, %a, %a", "setp.neu.f32 %p0, %a, %a"),
    (
        "setp.lt.f32 %p0, %a, %b",
        "cvt.f64.f32 %d1, %a; cvt.f64.f32 %d2, %b; setp.lt.f64 %p0, %d1, %d2",
    ),
    (
        "setp.eq.f32 %p0, %a, 0f00000000",
        "mov.b32 %r1, %a; and.b32 %r1, %r1, 0x7FFFFFFF; setp.eq.s32 %p0, %r1, 0",
    ),
    (
        "setp.lt.f32 %p1, %a, %b; selp.f32 %f0, %b, %c, %p1",
        "setp.geu.f32 %p1, %a, %b; selp.f32 %f0, %c, %b, %p1",
    ),
    (
        "setp.lt.f32 %p1, %a, %b; setp.lt.f32 %p2, %b, %c; and.pred %p1, %p1, %p2; "
        "selp.f32 %f0, %a, %c, %p1",
        "setp.lt.f32 %p1, %a, %b; setp.lt.f32 %p2, %b, %c; selp.f32 %f1, %a, %c, %p2; "
        "selp.f32 %f0, %f1, %c, %p1",
    ),
    (
        "setp.lt.f32 %p1, %a, %b; setp.lt.and.f32 %p0, %b, %c, %p1",
        "setp.lt.f32 %p1, %a, %b; setp.lt.f32 %p2, %b, %c; and.pred %p0, %p2, %p1",
    ),
    (
        "setp.lt.f32 %p1, %a, %b; selp.b32 %r1, 1, 0, %p1; setp.ne.s32 %p0, %r1, 0",
        "setp.lt.f32 %p0, %a, %b",
    ),
    ("mul.f32 %f0, %a, 0f3F800000", "mov.f32 %f0, %a"),
    ("setp.lt.f32 %p1, %a, %b; selp.f32 %f0, %c, %c, %p1", "mov.f32 %f0, %c"),
    # Equal by theorems that are not used.
    ("mul.f32 %f0, %a, 0f3F000000", "div.rn.f32 %f0, %a, 0f40000000"),
    ("sub.f32 %f0, %a, %b", "neg.f32 %f1, %b; add.f32 %f0, %a, %f1"),
    ("add.f32 %f0, %a, %a", "mul.f32 %f0, %a, 0f40000000"),
    ("min.f32 %f0, %a, %b", "min.f32 %f0, %b, %a"),
    ("fma.rn.f32 %f0, %a, %b, 0f80000000", "mul.f32 %f0, %a, %b"),
    (
        "mul.rn.bf16 %s0, %h, %k",
        "cvt.f32.bf16 %f1, %h; cvt.f32.bf16 %f2, %k; mul.f32 %f1, %f1, %f2; "
        "cvt.rn.bf16.f32 %s0, %f1",
    ),
    ("cvt.rn.f16.f32 %s0, %a", "cvt.rn.ftz.f16.f32 %s0, %a"),
]
"""Equal bits for all values, a NaN counted as one."""

NOT_PROVED = 7
"""Of the pairs that are equal, those that the normal forms do not cover."""

WITNESSES = {
    "cvt.f64.f32 %d1, %a; cvt.f64.f32 %d2, %b; cvt.f64.f32 %d3, %c; "
    "fma.rn.f64 %d0, %d1, %d2, %d3; cvt.rn.f32.f64 %f0, %d0": {
        "a": 0x33800001,
        "b": 0x3F7FFFFE,
        "c": 0x3F800001,
    },
    "cvt.rn.f32.f64 %f1, %x; cvt.rn.bf16.f32 %s0, %f1": {"x": 0x3FF0100000001000},
}
"""Operands for which a second fragment differs, where drawing finds none: it rounds twice."""
