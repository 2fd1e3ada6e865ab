"""Probes: kernels in which every thread loads operands, executes instructions and stores results.

The text is plain PTX that the CUDA driver compiles too. Results lie one after the other in one
buffer, 8 bytes for each thread and result. Predicates travel as 32-bit words, 1 for true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twinstep.replay.conformance.statements import Statement
from twinstep.replay.dtypes import Array, raw, width

THREADS = 64
SLOT = 8
LETTERS = "rstuvwyzRSTUVWYZ"
"""Names of results in a statement's text."""
Expected = list[int | None]


@dataclass(frozen=True)
class Result:
    """One stored result of a probe.

    Attributes:
        form: The opcode form that it shows.
        kind: PTX type, by which it is stored and compared.
        wanted: Per thread the bits, or None where they are left open.
        approximate: Whether hardware may differ by the documented error.
    """

    form: str
    kind: str
    wanted: Expected
    approximate: bool = False


@dataclass(frozen=True)
class Probe:
    """A kernel with its inputs and what it should leave in memory.

    Attributes:
        body: PTX between the address arithmetic and `ret`; stores included.
        inputs: Arrays of bit patterns, one value per thread (or any buffer).
        results: What is stored, in order.
        count: Threads in all.
        threads: Threads per block.
        variables: Declarations in front of the code.
        outside: Declarations of the module.
        bag: Bytes of a further parameter, `bag`.
    """

    body: str
    inputs: tuple[Array, ...]
    results: tuple[Result, ...]
    count: int
    threads: int = THREADS
    variables: str = ""
    outside: str = ""
    bag: bytes = b""

    @property
    def forms(self) -> frozenset[str]:
        """The forms that it shows."""
        return frozenset(result.form for result in self.results)

    def text(self, version: str, target: str) -> str:
        """The PTX module."""
        names = [f"p{i}" for i in range(len(self.inputs))] + ["out"]
        params = ", ".join(f".param .u64 {name}" for name in names)
        if self.bag:
            params += f", .param .align 16 .b8 bag[{len(self.bag)}]"
        head = f".version {version}\n.target {target}\n.address_size 64\n"
        lines = [
            f"{head}{self.outside}\n.visible .entry probe({params})\n{{",
            self.variables,
            ".reg .b32 %i, %n, %c, %lane, %t; .reg .b64 %w, %at, %o, %x; .reg .pred %no;",
            "mov.u32 %c, %ctaid.x; mov.u32 %n, %ntid.x; mov.u32 %i, %tid.x;",
            "mad.lo.s32 %i, %c, %n, %i; and.b32 %lane, %i, 31; cvt.u64.u32 %w, %i;",
            "ld.param.u64 %o, [out]; mad.lo.u64 %o, %w, 8, %o; cvta.to.global.u64 %o, %o;",
            self.body,
            "ret;\n}\n",
        ]
        return "\n".join(lines)


def register(kind: str) -> str:
    """The type a register of this PTX type is declared with."""
    return "pred" if kind == "pred" else f"b{8 * max(width(kind), 2)}"


def load(index: int, kind: str) -> str:
    """PTX that loads this thread's value of input `index` into %s<index>."""
    memory = "u32" if kind == "pred" else raw(kind)
    size = 2 if memory == "u8" else width(memory)
    memory = "u16" if memory == "u8" else memory
    address = (
        f"ld.param.u64 %at, [p{index}]; cvta.to.global.u64 %at, %at; "
        f"mad.lo.u64 %at, %w, {size}, %at;"
    )
    if kind == "pred":
        return (
            f"{address} ld.global.u32 %t, [%at]; .reg .pred %s{index}; "
            f"setp.ne.u32 %s{index}, %t, 0;"
        )
    register_kind = register(kind)
    return f"{address} .reg .{register_kind} %s{index}; ld.global.{memory} %s{index}, [%at];"


def store(name: str, kind: str, place: int, count: int) -> str:
    """PTX that stores a register as result number `place`."""
    offset = place * count * SLOT
    if kind == "pred":
        return f"selp.u32 %t, 1, 0, {name}; st.global.u32 [%o+{offset}], %t;"
    memory = "u16" if width(kind) == 1 else raw(kind)
    return f"st.global.{memory} [%o+{offset}], {name};"


def stored_kind(kind: str) -> str:
    """The type as which a result lies in memory."""
    return {"pred": "u32", "u8": "u16", "s8": "u16"}.get(kind, kind)


def batch(
    statements: Sequence[Statement],
    inputs: Sequence[Array],
    before: str = "",
    variables: str = "",
    outside: str = "",
    scratch: int = 0,
) -> Probe:
    """One probe that shows many forms with the same sources.

    Args:
        statements: The forms.
        inputs: One array for each source.
        before: PTX in front of the first form.
        variables: Declarations in front of all.
        outside: Declarations of the module.
        scratch: Bytes per thread of a last input to write to.
    """
    kinds = statements[0].sources
    count = -(-len(inputs[0]) // THREADS) * THREADS
    padded = [np.resize(x, count) for x in inputs]
    rows = list(zip(*(x.tolist() for x in padded), strict=True))
    lines = [load(i, kind) for i, kind in enumerate(kinds)] + [before]
    results: list[Result] = []
    for number, one in enumerate(statements):
        names = [f"%r{number}_{i}" for i in range(len(one.results))]
        for name, kind in zip(names, one.results, strict=True):
            lines.append(f".reg .{register(kind)} {name};")
        places = dict(zip(LETTERS, names, strict=False))
        sources = {"abcdefgh"[i]: f"%s{i}" for i in range(len(kinds))}
        lines.append(one.code.format(**places, **sources))
        wanted = [one.want(*row) for row in rows]
        for index, (name, kind) in enumerate(zip(names, one.results, strict=True)):
            lines.append(store(name, kind, len(results), count))
            column: Expected = [None if w is None else w[index] for w in wanted]
            results.append(Result(one.form, stored_kind(kind), column, one.approximate))
    if scratch:
        padded.append(np.zeros(count * scratch, np.uint8))
    body = "\n".join(lines)
    arrays = tuple(padded)
    return Probe(body, arrays, tuple(results), count, variables=variables, outside=outside)
