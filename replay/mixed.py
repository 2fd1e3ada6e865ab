"""Arithmetic in fp32 whose first sources are fp16 or bf16: `add.rn.f32.bf16`, `fma.rn.f32.f16`.

The narrow sources widen without rounding; then it is the fp32 instruction, with its one rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from twinstep.replay.dtypes import Array
from twinstep.replay.operations import Operation


def is_mixed(parts: tuple[str, ...]) -> bool:
    """Whether an opcode names fp32 and then a 16-bit float."""
    return len(parts) > 2 and parts[-2] == "f32" and parts[-1] in ("f16", "bf16")


def widen(x: Array, kind: str) -> Array:
    """fp16 or bf16 values as fp32."""
    if kind == "f16":
        return x.view(np.float16).astype(np.float32)
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def mixed_operation(parts: tuple[str, ...], resolve: Callable[..., Operation]) -> Operation:
    """The operation of a mixed opcode, from the resolver of its fp32 form."""
    kind, inner = parts[-1], resolve(parts[:-1])
    narrow = len(inner.sources) - 1

    def function(*sources: Array) -> Array:
        first = (widen(x, kind) for x in sources[:narrow])
        result = inner.function(*first, *sources[narrow:])
        assert isinstance(result, np.ndarray)
        return result

    return Operation(function, (kind,) * narrow + ("f32",), ("f32",), inner.canonical)
