"""Pairs of PTX fragments that are one function of real numbers, and pairs that are two."""

ROOT = "sqrt.rn.f32"

SAME: list[tuple[str, str]] = [
    ("add.f32 %f1, %a, %b; add.f32 %f0, %f1, %c", "add.f32 %f1, %b, %c; add.f32 %f0, %a, %f1"),
    ("mul.f32 %f1, %a, %b; div.rn.f32 %f0, %f1, %b", "mov.f32 %f0, %a"),
    ("div.rn.f32 %f0, %a, %b", "rcp.rn.f32 %f1, %b; mul.f32 %f0, %a, %f1"),
    (
        "div.rn.f32 %f1, %a, %b; div.rn.f32 %f0, %f1, %c",
        "mul.f32 %f1, %b, %c; div.rn.f32 %f0, %a, %f1",
    ),
    (
        "add.f32 %f1, %a, %b; mul.f32 %f0, %f1, %c",
        "mul.f32 %f1, %a, %c; fma.rn.f32 %f0, %b, %c, %f1",
    ),
    (f"{ROOT} %f1, %a; mul.f32 %f0, %f1, %f1", "mov.f32 %f0, %a"),
    (f"mul.f32 %f1, %a, %a; {ROOT} %f0, %f1", "abs.f32 %f0, %a"),
    (
        f"div.rn.f32 %f1, %a, %b; {ROOT} %f0, %f1",
        f"{ROOT} %f1, %a; {ROOT} %f2, %b; div.rn.f32 %f0, %f1, %f2",
    ),
    (f"mul.f32 %f1, %a, 0f40800000; {ROOT} %f0, %f1", f"{ROOT} %f1, %a; add.f32 %f0, %f1, %f1"),
    ("max.f32 %f1, %a, %b; min.f32 %f2, %a, %b; add.f32 %f0, %f1, %f2", "add.f32 %f0, %a, %b"),
    ("max.f32 %f0, %a, %b", "setp.lt.f32 %p1, %a, %b; selp.f32 %f0, %b, %a, %p1"),
    (
        "setp.eq.f32 %p1, %a, 0f3F800000; mul.f32 %f1, %a, %b; selp.f32 %f0, %b, %f1, %p1",
        "mul.f32 %f0, %a, %b",
    ),
    (
        "mul.f32 %f1, %a, %b; ex2.approx.f32 %f0, %f1",
        "mul.f32 %f1, %b, %a; ex2.approx.ftz.f32 %f0, %f1",
    ),
]

OTHER: list[tuple[str, str]] = [
    ("setp.nan.f32 %p1, %a, %a; selp.f32 %f0, 0f00000000, %a, %p1", "mov.f32 %f0, %a"),
    (
        "abs.f32 %f1, %a; setp.lt.f32 %p1, %f1, 0f7F800000; selp.f32 %f0, %a, %b, %p1",
        "mov.f32 %f0, %a",
    ),
    ("sub.f32 %f0, %a, %b", "sub.f32 %f0, %b, %a"),
    ("add.f32 %f0, %a, 0f33D6BF95", "mov.f32 %f0, %a"),
    ("mul.f32 %f0, %a, 0f3F7FBE77", "mul.f32 %f0, %a, 0f3F7FBE76"),
    (
        f"add.f32 %f1, %a, %b; {ROOT} %f0, %f1",
        f"{ROOT} %f1, %a; {ROOT} %f2, %b; add.f32 %f0, %f1, %f2",
    ),
    (f"{ROOT} %f1, %a; add.f32 %f0, %f1, %b", f"add.f32 %f1, %a, %b; {ROOT} %f0, %f1"),
    (f"mul.f32 %f1, %a, %a; {ROOT} %f0, %f1", "mov.f32 %f0, %a"),
    (
        "setp.eq.f32 %p1, %a, 0f3F800000; selp.f32 %f1, %c, %b, %p1; mul.f32 %f0, %a, %f1",
        "mul.f32 %f0, %a, %b",
    ),
    ("setp.lt.f32 %p1, %a, %b; selp.f32 %f0, %c, %b, %p1", "mov.f32 %f0, %b"),
    (
        "setp.lt.f32 %p1, %a, %b; setp.lt.f32 %p2, %b, %c; and.pred %p1, %p1, %p2; "
        "selp.f32 %f0, %a, %c, %p1",
        "mov.f32 %f0, %c",
    ),
    (
        "setp.lt.f32 %p1, %a, 0f3F000000; selp.f32 %f0, %b, %c, %p1",
        "setp.lt.f32 %p1, %a, 0f3F000001; selp.f32 %f0, %b, %c, %p1",
    ),
    ("ex2.approx.f32 %f0, %a", "lg2.approx.f32 %f0, %a"),
    ("mul.f32 %f1, %a, 0f7F000000; mul.f32 %f0, %f1, 0f7F000000", "mov.f32 %f0, %a"),
    ("cvt.rzi.f32.f32 %f0, %a", "mov.f32 %f0, %a"),
    ("mov.b32 %r1, %a; add.u32 %r1, %r1, 1; mov.b32 %f0, %r1", "mov.f32 %f0, %a"),
]
