"""Compile the CUDA C++ part of the corpus with the NVRTC that this process sees.

python -m twinstep.replay.corpus.compile_cuda OUT.json KEPT.jsonl [MODULE ...]
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from twinstep.replay.corpus.case import CASES, Case
from twinstep.replay.corpus.kernels import load
from twinstep.replay.corpus.text import HOME, normalised
from twinstep.replay.corpus.text_cache import Job, Row, rows
from twinstep.replay.cuda import nvrtc

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
        name=f"{HOME}cuda/{case.source}",
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


def jobs(also: Iterable[str]) -> Iterator[Job]:
    """Every CUDA C++ kernel for every target."""
    load(also)
    for case in CASES.values():
        if case.source:
            text = (SOURCES / case.source).read_text()
            for sm in case.sms:
                decides = f"{case.name} {case.kernel} {sm} {flags(case)} {case.options} {text}"
                yield decides, partial(compiled, case, sm)


def preload() -> None:
    """Load the NVRTC that is meant before its bindings look for one: they prefer the newest."""
    for folder in os.environ["LD_LIBRARY_PATH"].split(os.pathsep):
        for library in sorted(Path(folder).glob("libnvrtc.so.*")):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def main(out: str, kept: str, *also: str) -> None:
    """Write all rows, how many were made, and which tools made them."""
    preload()
    found, made = rows(jobs(also), Path(kept))
    tools = {
        "nvrtc": nvrtc.version(),
        "command": "nvrtcCompileProgram --gpu-architecture=compute_SM --generate-line-info",
    }
    document = {"tools": {f"nvrtc-{nvrtc.version()}": tools}, "rows": found, "made": made}
    Path(out).write_text(json.dumps(document))


if __name__ == "__main__":
    main(*sys.argv[1:])
