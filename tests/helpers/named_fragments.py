"""Fragments of PTX put into a kernel, and the numbers that their results have."""

import re

import torch

from twinstep.replay import run_ptx
from twinstep.replay.names.naming import name_tensor, names_of, naming
from twinstep.replay.names.session import Session

INPUTS = {
    **dict.fromkeys("abc", ("f32", torch.float32)),
    **dict.fromkeys("xyz", ("f64", torch.float64)),
    **dict.fromkeys("hkl", ("b16", torch.int16)),
    "w": ("b32", torch.int32),
}
RESULTS = {"f": ("f32", 4), "d": ("f64", 8), "s": ("b16", 2), "r": ("b32", 4), "p": ("b32", 4)}


def kernel(fragments: tuple[str, str]) -> tuple[str, list[str]]:
    """A kernel that stores the results of both fragments, and the kinds of these."""
    lines, kinds = [], []
    for name, (kind, _) in INPUTS.items():
        lines.append(f"ld.param.u64 %q0, [{name}]; ld.global.{kind} %{name}, [%q0];")
    for index, fragment in enumerate(fragments):
        lines.append(f"{fragment};")
        register = re.findall(r"%[a-z]\d", fragment.split(";")[-1])[0]
        kind, _ = RESULTS[register[1]]
        kinds.append(register[1])
        lines.append(f"ld.param.u64 %q0, [out{index}];")
        if register[1] == "p":
            lines.append(f"selp.b32 %r9, 1, 0, {register}; st.global.b32 [%q0], %r9;")
        else:
            lines.append(f"st.global.{kind} [%q0], {register};")
    params = ", ".join(f".param .u64 {name}" for name in (*INPUTS, "out0", "out1"))
    declared = "".join(f".reg .{kind} %{name};" for name, (kind, _) in INPUTS.items())
    text = (
        f".version 8.7\n.target sm_100\n.address_size 64\n.visible .entry k({params}) {{\n"
        ".reg .f32 %f<9>; .reg .f64 %d<9>; .reg .b16 %s<9>; .reg .b32 %r<10>; .reg .pred %p<9>;"
        f" .reg .b64 %q<2>; {declared}\n" + "\n".join(lines) + "\nret;\n}\n"
    )
    return text, kinds


def named(fragments: tuple[str, str]) -> tuple[Session, int, int, str]:
    """Numbers of both results, and the float format that they have."""
    text, kinds = kernel(fragments)
    tensors = [torch.ones((), dtype=dtype) for _, dtype in INPUTS.values()]
    outs = [torch.zeros(RESULTS[kind][1] // 2, dtype=torch.int16) for kind in kinds]
    with naming() as session:
        for name, tensor in zip(INPUTS, tensors, strict=True):
            name_tensor(session, tensor, name)
        run_ptx(text, "k", (1,), (1,), [*tensors, *outs])
        wide = {1: torch.int16, 2: torch.int32, 4: torch.int64}
        found = [int(names_of(session, o.view(wide[len(o)])).flat[0]) for o in outs]
        for index, (number, out) in enumerate(zip(found, outs, strict=True)):
            if number < 0:
                bits = int(out.numpy().view(f"u{2 * len(out)}")[0])
                found[index] = session.table.const(bits, len(out))
    kind = {"f": "f32", "d": "f64"}.get(kinds[0], "")
    last = fragments[0].split(";")[-1].split(" ")
    opcode = next(word for word in last if word)
    kind = kind or ("bf16" if "bf16" in opcode else "f16" if "f16" in opcode else "")
    return session, found[0], found[1], kind
