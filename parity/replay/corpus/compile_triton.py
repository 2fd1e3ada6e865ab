"""Compile the Triton part of the corpus with the Triton that this process sees.

    python -m parity.replay.corpus.compile_triton OUT.json

Runs in a process of its own, with one version of Triton first on the path; needs no GPU.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from parity.replay.corpus.case import CASES, Case
from parity.replay.corpus.kernels import load
from parity.replay.corpus.text import normalised

Row = dict[str, object]


def compiled(case: Case, sm: int) -> Row:
    """One kernel for one target."""
    names = list(case.kernel.arg_names)  # type: ignore[attr-defined]
    aligned = [
        names.index(name)
        for name, kind in case.signature.items()
        if kind.startswith("*") and name not in case.unaligned
    ]
    signature = {
        name: "constexpr" if name in case.constants else case.signature[name] for name in names
    }
    source = ASTSource(
        case.kernel,
        signature,
        {(names.index(name),): value for name, value in case.constants.items()},
        {(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    made = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=dict(case.options))
    text = normalised(made.asm["ptx"])
    return {
        "case": case.name,
        "compiler": f"triton-{triton.__version__}",
        "sm": sm,
        "kernel": made.metadata.name,
        "version": text.version,
        "target": text.target,
        "shared": made.metadata.shared,
        "body": text.digest,
        "text": text.body,
    }


def all_compiled() -> Iterator[Row]:
    """Every Triton kernel for every target."""
    load()
    for case in CASES.values():
        if not case.source:
            for sm in case.sms:
                yield compiled(case, sm)


def assembler() -> str:
    """The version of the assembler that comes with this Triton."""
    path = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    return said.partition("release ")[2].partition("\n")[0]


def source_hash(case: Case) -> str:
    """SHA-256 of a jitted function's source."""
    return hashlib.sha256(case.kernel.src.encode()).hexdigest()  # type: ignore[attr-defined]


def main(out: str) -> None:
    """Write all rows, and which tools made them."""
    rows = list(all_compiled())
    name = f"triton-{triton.__version__}"
    tools = {
        "triton": triton.__version__,
        "ptxas": assembler(),
        "command": 'triton.compile(ASTSource(...), target=GPUTarget("cuda", sm, 32))',
    }
    Path(out).write_text(json.dumps({"tools": {name: tools}, "rows": rows}))


if __name__ == "__main__":
    main(sys.argv[1])
