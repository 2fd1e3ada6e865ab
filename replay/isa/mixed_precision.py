"""Arithmetic in fp32 whose first sources are fp16 or bf16: `add.rn.f32.bf16`, `fma.rn.f32.f16`.

The narrow sources widen without rounding; then it is the fp32 instruction, with its one rounding.
"""

from __future__ import annotations

import numpy as np

from twinstep.replay.dtypes import Array
from twinstep.replay.isa.floating import fused_operation, sum_operation
from twinstep.replay.isa.operations import Operation, Table


def widen(x: Array, kind: str) -> Array:
    """fp16 or bf16 values as fp32."""
    if kind == "f16":
        return x.view(np.float16).astype(np.float32)
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _mixed(parts: tuple[str, ...]) -> Operation:
    """The operation of a mixed opcode, from its fp32 form."""
    kind = parts[-1]
    inner = (fused_operation if parts[0] == "fma" else sum_operation)(parts[:-1])
    narrow = len(inner.sources) - 1

    def function(*sources: Array) -> Array:
        first = (widen(x, kind) for x in sources[:narrow])
        result = inner.function(*first, *sources[narrow:])
        assert isinstance(result, np.ndarray)
        return result

    return Operation(function, (kind,) * narrow + ("f32",), ("f32",), inner.canonical)


FORMS: Table = {
    "add sub: ?$round ?sat | f32 f16,bf16": _mixed,
    "fma: $round ?sat | f32 f16,bf16": _mixed,
}
