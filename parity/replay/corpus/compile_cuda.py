"""Compile the CUDA C++ part of the corpus with the NVRTC that this process sees.

python -m parity.replay.corpus.compile_cuda OUT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from parity.replay import nvrtc
from parity.replay.corpus.case import CASES, Case
from parity.replay.corpus.kernels import load
from parity.replay.corpus.text import normalised

Row = dict[str, object]
SOURCES = Path(__file__).parent / "cuda"


def flags(case: Case) -> list[str]:
    """Compiler options of a case beyond the target."""
    contract = "true" if case.options.get("fmad", True) else "false"
    return ["--generate-line-info", f"--fmad={contract}"]


def compiled(case: Case, sm: int) -> Row:
    """One kernel for one target; other kernels of the file are left out of the text."""
    source = (SOURCES / case.source).read_text()
    made = nvrtc.compile_ptx(
        source,
        name=f"parity/replay/corpus/cuda/{case.source}",
        target=f"compute_{sm}",
        options=flags(case),
    )
    text = normalised(made)
    return {
        "case": case.name,
        "compiler": f"nvrtc-{nvrtc.version()}",
        "sm": sm,
        "kernel": str(case.kernel),
        "version": text.version,
        "target": text.target,
        "shared": case.options.get("shared", 0),
        "body": text.digest,
        "text": text.body,
    }


def all_compiled() -> Iterator[Row]:
    """Every CUDA C++ kernel for every target."""
    load()
    for case in CASES.values():
        if case.source:
            for sm in case.sms:
                yield compiled(case, sm)


def main(out: str) -> None:
    """Write all rows, and which tools made them."""
    rows = list(all_compiled())
    tools = {
        "nvrtc": nvrtc.version(),
        "command": "nvrtcCompileProgram --gpu-architecture=compute_SM --generate-line-info",
    }
    Path(out).write_text(json.dumps({"tools": {f"nvrtc-{nvrtc.version()}": tools}, "rows": rows}))


if __name__ == "__main__":
    main(sys.argv[1])
