"""A kernel of one instruction, to see what the whole engine makes of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from parity.replay.dtypes import Array, raw, width
from parity.replay.launch import run_ptx

_HEAD = ".version 8.7\n.target sm_100a\n.address_size 64\n"
_BLOCK = 128


def register(kind: str) -> str:
    """The type a register of this PTX type is declared with."""
    return "pred" if kind == "pred" else f"b{8 * max(width(kind), 2)}"


def probe_text(opcode: str, sources: Sequence[str], result: str, tail: str = "") -> str:
    """PTX of a kernel: out[i] = opcode(in0[i], in1[i], ...) for a grid of whole blocks.

    Args:
        opcode: With all modifiers.
        sources: PTX types of the sources; "pred" sources are words, true where not zero.
        result: PTX type of the result.
        tail: Further operands, such as ", 0x96".
    """
    params = ", ".join(f".param .u64 p{i}" for i in range(len(sources) + 1))
    lines = [
        ".reg .b32 %i, %n, %c; .reg .b64 %w, %a, %o;",
        "mov.u32 %c, %ctaid.x; mov.u32 %n, %ntid.x; mov.u32 %i, %tid.x;",
        "mad.lo.s32 %i, %c, %n, %i; cvt.u64.u32 %w, %i;",
    ]
    for i, kind in enumerate(sources):
        memory = "u32" if kind == "pred" else raw(kind)
        lines.append(f".reg .{register('u32' if kind == 'pred' else kind)} %m{i};")
        lines.append(f"ld.param.u64 %a, [p{i}]; mul.lo.u64 %o, %w, {width(memory)};")
        lines.append(f"add.u64 %a, %a, %o; ld.global.{memory} %m{i}, [%a];")
        if kind == "pred":
            lines.append(f".reg .pred %s{i}; setp.ne.u32 %s{i}, %m{i}, 0;")
        else:
            lines.append(f".reg .{register(kind)} %s{i}; mov.{register(kind)} %s{i}, %m{i};")
    operands = ", ".join(f"%s{i}" for i in range(len(sources)))
    lines.append(f".reg .{register(result)} %r; {opcode} %r, {operands}{tail};")
    stored = "%r"
    if result == "pred":
        lines.append(".reg .b32 %q; selp.b32 %q, 1, 0, %r;")
        stored = "%q"
    memory = "u32" if result == "pred" else raw(result)
    lines.append(f"ld.param.u64 %a, [p{len(sources)}]; mul.lo.u64 %o, %w, {width(memory)};")
    lines.append(f"add.u64 %a, %a, %o; st.global.{memory} [%a], {stored}; ret;")
    return f"{_HEAD}.visible .entry probe({params})\n{{\n" + "\n".join(lines) + "\n}\n"


def run_probe(
    opcode: str, sources: Sequence[str], result: str, inputs: Sequence[Array], tail: str = ""
) -> Array:
    """Execute one instruction on arrays of bit patterns; returns the result's bit patterns."""
    count = len(inputs[0])
    padded = -(-count // _BLOCK) * _BLOCK
    tensors = []
    for kind, values in zip([*sources, result], [*inputs, np.zeros(count)], strict=True):
        dtype = np.dtype(f"u{width('u32' if kind == 'pred' else kind)}")
        data = np.zeros(padded, dtype)
        data[:count] = values.astype(dtype)
        tensors.append(torch.from_numpy(data.view(np.uint8)))
    text = probe_text(opcode, sources, result, tail)
    run_ptx(text, "probe", (padded // _BLOCK,), (_BLOCK,), tensors)
    out = tensors[-1].numpy()
    return out.view(f"u{width('u32' if result == 'pred' else result)}")[:count]
