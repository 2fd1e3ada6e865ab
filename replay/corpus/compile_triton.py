"""Compile the Triton part of the corpus with the Triton that this process sees.

    python -m twinstep.replay.corpus.compile_triton OUT.json KEPT.jsonl [MODULE ...]

Runs in a process of its own, with one version of Triton first on the path; needs no GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twinstep.replay.corpus.case import CASES, Case
from twinstep.replay.corpus.kernels import load
from twinstep.replay.corpus.text import normalised
from twinstep.replay.corpus.text_cache import Job, Row, rows


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


def jobs(also: Iterable[str]) -> Iterator[Job]:
    """Every Triton kernel for every target."""
    load(also)
    for case in CASES.values():
        if not case.source:
            # Triton's own key: the source of the kernel and of all it calls, and their lines.
            code = str(case.kernel.cache_key)  # type: ignore[attr-defined]
            for sm in case.sms:
                how = (case.signature, case.constants, case.options, case.unaligned)
                yield f"{case.name} {sm} {code} {how}", partial(compiled, case, sm)


def assembler() -> str:
    """The version of the assembler that comes with this Triton."""
    path = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    return said.partition("release ")[2].partition("\n")[0]


def main(out: str, kept: str, *also: str) -> None:
    """Write all rows, how many were made, and which tools made them."""
    found, made = rows(jobs(also), Path(kept))
    name = f"triton-{triton.__version__}"
    tools = {
        "triton": triton.__version__,
        "ptxas": assembler(),
        "command": 'triton.compile(ASTSource(...), target=GPUTarget("cuda", sm, 32))',
    }
    Path(out).write_text(json.dumps({"tools": {name: tools}, "rows": found, "made": made}))


if __name__ == "__main__":
    main(*sys.argv[1:])
