"""The main loop of a compiled kernel: its instructions by class, in one turn of one thread.

The main loop is the innermost loop that reads the most bytes in wide accesses, of 8 bytes at least:
what a large aligned tensor goes through. Read from SASS (`cuobjdump -sass`) or AMD assembly.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from twinstep.parity.proof.gates.compile.artefacts import Facts

# Kernels whose main loop is counted.
KERNELS = (
    "reduce_flat_kernel",
    "reduce_list_kernel",
    "adam_flat_kernel",
    "adam_list_kernel",
    "lamb_moments_kernel",
    "apex_lamb_moments_kernel",
)
# Class of an instruction -> pattern of its mnemonic, the first that matches; rates differ by class.
NVIDIA = {
    "barrier": r"BAR|WARPSYNC|DEPBAR",
    "local": r"LDL|STL",
    "memory": r"LDG|STG|LD\b|ST\b|ATOM|RED\b|REDG",
    "shared": r"LDS|STS|SHFL",
    "float64": r"D(?:ADD|MUL|FMA|SETP|MNMX)",
    "special": r"MUFU|F2F|F2I|I2F|FRND|POPC|FLO|BREV",
    "wide": r"IMAD\.WIDE|IMAD\.HI",
    "fma": r"F(?:ADD|MUL|FMA)|FSWZADD|HADD2|HMUL2|HFMA2|IMAD",
    "uniform": r"U[A-Z0-9]+",
    "branch": r"BRA|BSSY|BSYNC|CALL|RET|EXIT|BREAK|JMP|BRX|NOP",
    "integer": r".*",
}
AMD = {
    "barrier": r"s_barrier",
    "local": r"scratch_",
    "memory": r"global_|flat_|buffer_",
    "shared": r"ds_",
    "float64": r"v_\w*_f64",
    "special": r"v_(?:rcp|rsq|sqrt|exp|log|sin|cos)_",
    "wide": r"v_mad_[iu]64|v_mul_hi",
    "uniform": r"s_",
    "integer": r".*",
}


@dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    Attributes:
        place: where it is.
        mnemonic: its name.
        target: where it branches to, or what it calls, if it does.
        guarded: whether it happens to some threads only.
    """

    place: int
    mnemonic: str
    target: int | None = None
    guarded: bool = False

    @property
    def falls_through(self) -> bool:
        """True if the next one may follow."""
        return self.guarded or not _ENDS.match(self.mnemonic)

    @property
    def closes_a_loop(self) -> bool:
        """True of a branch to an earlier place."""
        return self.target is not None and self.target <= self.place

    @property
    def loaded(self) -> int:
        """Bytes that it loads from global memory; 0 where it is no load."""
        if not _LOAD.match(self.mnemonic):
            return 0
        wide = _WIDE.search(self.mnemonic)
        return _BYTES[wide[0]] if wide else 4


_SASS = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;\n]*);", re.MULTILINE
)
_GOES = re.compile(r"BRA|CALL")
_ENDS = re.compile(r"BRA|EXIT|RET|JMP")
_LOAD = re.compile(r"LDG?\.|(?:global|flat|buffer)_load")
_WIDE = re.compile(r"\.128|\.64|dwordx4|dwordx2")
_BYTES = {".128": 16, "dwordx4": 16, ".64": 8, "dwordx2": 8}


def of_sass(text: str) -> Facts:
    """Facts of the main loop in what `cuobjdump -sass` prints; none where there is no such loop."""
    return _facts(code_of(text), NVIDIA)


def code_of(text: str) -> list[Instruction]:
    """The instructions in what `cuobjdump -sass` prints of one kernel."""
    code = []
    for place, guard, mnemonic, operands in _SASS.findall(text):
        to = re.search(r"0x([0-9a-f]+)\s*$", operands) if _GOES.match(mnemonic) else None
        guarded = bool(guard) or "," in operands
        code.append(Instruction(int(place, 16), mnemonic, int(to[1], 16) if to else None, guarded))
    return code


def of_assembly(text: str) -> Facts:
    """Facts of the main loop in AMD assembly; none where there is no such loop."""
    labels: dict[str, int] = {}
    lines: list[tuple[str, str]] = []
    for line in text.splitlines():
        if label := re.match(r"(\.\w+):", line):
            labels[label[1]] = len(lines)
        elif found := re.match(r"\s+([a-z]\w+)\s*([^;]*)", line):
            lines.append((found[1], found[2].strip()))
    # A branch while any lane is left goes round one access, for lanes with different addresses.
    code = [
        Instruction(
            place, name, labels.get(operands) if re.search("branch(?!_exec)", name) else None
        )
        for place, (name, operands) in enumerate(lines)
    ]
    return _facts(code, AMD)


def _facts(code: Sequence[Instruction], classes: dict[str, str]) -> Facts:
    loops = [
        [one for one in code if last.target <= one.place <= last.place]
        for last in code
        if last.target is not None and last.closes_a_loop
    ]
    innermost = [loop for loop in loops if sum(one.closes_a_loop for one in loop) == 1]
    return facts_of_loop(max(innermost, key=wide_bytes, default=[]), classes)


def facts_of_loop(main: Sequence[Instruction], classes: dict[str, str]) -> Facts:
    """Counts of one turn; none where nothing is loaded in wide accesses."""
    if not wide_bytes(main):
        return {}
    kinds = [_class_of(one.mnemonic, classes) for one in main]
    return {
        "loop": len(main),
        "loop_bytes": wide_bytes(main),
        "loop_narrow": sum(0 < one.loaded < 8 for one in main),
        **{f"loop_{kind}": kinds.count(kind) for kind in sorted(set(kinds))},
    }


def _class_of(mnemonic: str, classes: dict[str, str]) -> str:
    return next(name for name, pattern in classes.items() if re.match(pattern, mnemonic))


def wide_bytes(loop: Sequence[Instruction]) -> int:
    """Bytes that wide accesses load from global memory."""
    return sum(one.loaded for one in loop if one.loaded >= 8)
