"""The prover attacked: pairs of fragments with known different bits, and with known equal ones."""

import re

import numpy as np
import pytest
import torch

from tests.helpers.name_pairs import DIFFERENT, EQUAL, WITNESSES
from twinstep.parity.prove.search import telling
from twinstep.replay import run_ptx
from twinstep.replay.names.evaluate import evaluate, leaves_of
from twinstep.replay.names.naming import name_tensor, names_of, naming
from twinstep.replay.names.session import Session

INPUTS = {
    **dict.fromkeys("abc", ("f32", torch.float32)),
    **dict.fromkeys("xyz", ("f64", torch.float64)),
    **dict.fromkeys("hkl", ("b16", torch.int16)),
    "w": ("b32", torch.int32),
}
RESULTS = {"f": ("f32", 4), "d": ("f64", 8), "s": ("b16", 2), "r": ("b32", 4), "p": ("b32", 4)}
NOT_PROVED = 7
"""Of the pairs that are equal, those that the normal forms do not cover."""


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


def differ(session: Session, a: int, b: int, kind: str, fragment: str) -> bool:
    """True if the expressions differ for operands that are known, or drawn."""
    if fragment not in WITNESSES:
        return telling(session.table, a, b, kind, (), {}, rounds=12) is not None
    known = WITNESSES[fragment]
    leaves = {}
    for leaf in leaves_of(session.table, [a, b]):
        row = session.table.rows[leaf]
        bits = known[session.table.leaves[row.args[0]]]
        leaves[leaf] = np.array([[bits]], f"u{2 * row.granules}")
    values = evaluate(session.table, [a, b], leaves)
    return bool((values[a] != values[b]).any())


def test_there_are_enough_pairs() -> None:
    assert len(set(DIFFERENT)) >= 100
    assert len(set(EQUAL)) >= 50


@pytest.mark.parametrize("chunk", range(4))
def test_no_pair_with_different_bits_has_one_name(chunk: int) -> None:
    for pair in DIFFERENT[chunk::4]:
        session, a, b, kind = named(pair)
        assert a != b, pair
        assert differ(session, a, b, kind, pair[1]), pair


def test_pairs_with_equal_bits_that_are_not_proved_are_counted() -> None:
    unproved = []
    for pair in EQUAL:
        session, a, b, kind = named(pair)
        if a != b:
            unproved.append(pair)
            assert telling(session.table, a, b, kind, (), {}) is None, pair
    assert unproved == EQUAL[-NOT_PROVED:]
