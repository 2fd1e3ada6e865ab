"""Features of PTX that replay does not implement, by the opcodes and registers that show them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Limit:
    """One feature that replay refuses.

    Attributes:
        construct: Its name, as in `CannotReplay.construct`.
        pattern: The opcodes or registers that belong to it, from their beginning.
        meets: Where one meets it, for the README.
        example: PTX that is refused for it.
    """

    construct: str
    pattern: str
    meets: str
    example: str


LIMITS = (
    Limit(
        "wgmma",
        r"wgmma\b",
        '`tl.dot` for sm_90 (but fp32 with `input_precision="ieee"` runs)',
        "wgmma.fence.sync.aligned;",
    ),
    Limit(
        "mma",
        r"w?mma\b",
        "`tl.dot` of small tiles or before sm_90",
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%f0,%f1,%f2,%f3}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%f0,%f1,%f2,%f3};",
    ),
    Limit("tcgen05", r"tcgen05\b", "`tl.dot` for sm_100", "tcgen05.wait::ld.sync.aligned;"),
    Limit(
        "TMA",
        r"cp\.(?:reduce\.)?async\.bulk\b|tensormap\b|prefetch\.tensor\b|multimem\b",
        "tensor descriptors, bulk copies",
        "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%r1], [%rd1, {%r3}], [%r2];",
    ),
    Limit(
        "mbarrier",
        r"mbarrier\b|cp\.async\.mbarrier\b",
        "asynchronous copies with a transaction count",
        "mbarrier.init.shared.b64 [%r1], 1;",
    ),
    Limit(
        "cluster",
        r"barrier\.cluster\b|mapa\b|getctarank\b|clusterlaunchcontrol\b|.*\bshared::cluster\b",
        "`num_ctas` above 1, `__cluster_dims__`",
        "barrier.cluster.arrive;",
    ),
    Limit(
        "narrow float conversion",
        r"cvt\b.*\.(?:ue\d+m\d+|e[23]m\d+|e\d+m\d+x4|e\d+m\d+x2\.bf16x2)",
        "conversions from and to 6- and 4-bit floats and `ue8m0`, of bf16 pairs to 8 bits",
        "cvt.rn.satfinite.e2m1x2.f32 %h1, %f1, %f2;",
    ),
    Limit(
        "bar.arrive",
        r"bar(?:rier)?(?:\.cta)?\.arrive\b",
        "producer and consumer warps",
        "bar.arrive 1, 64;",
    ),
    Limit(
        "clock",
        r"%(?:clock|globaltimer)",
        "`clock()`, `tl.extra.cuda.globaltimer()`",
        "mov.u32 %r1, %clock;",
    ),
    Limit(
        "texture or surface",
        r"(?:tex|tld4|txq|suld|sust|sured|suq|istypep)\b|texref\b|surfref\b|samplerref\b",
        "textures in CUDA C++",
        "suq.width.b32 %r1, [%rd1];",
    ),
    Limit(
        "128 bits",
        r".*\.b128\b|b128\b",
        "128-bit atomics and registers",
        "mov.b128 %rd1, {%rd2, %rd3};",
    ),
    Limit(
        "stack",
        r"(?:alloca|stacksave|stackrestore)\b",
        "`alloca` in CUDA C++",
        "stacksave.u64 %rd1;",
    ),
    Limit(
        "movmatrix",
        r"movmatrix\b",
        "transposes between registers",
        "movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r2;",
    ),
    Limit(
        "video instruction",
        r"v(?:add|sub|absdiff|min|max|shl|shr|mad|set)[24]?\b",
        "SIMD intrinsics of CUDA C++ for old targets",
        "vadd.s32.s32.s32 %r1, %r2, %r3;",
    ),
)


@lru_cache(4096)
def construct_of(name: str) -> str:
    """The feature that an opcode, register or type belongs to; itself where it has no row."""
    for limit in LIMITS:
        if re.match(limit.pattern, name):
            return limit.construct
    return name


def markdown() -> str:
    """The rows as a table."""
    lines = ["| not implemented | met in |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {row.construct} | {row.meets} |" for row in LIMITS)])
