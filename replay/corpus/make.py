"""Makes the corpus: each compiler in a throw-away folder, each in a process of its own.

    python -m twinstep.replay.corpus make [--environments .corpus-venv]

Needs a package registry the first time; afterwards the folders are found and used again. Texts that
were made before are in the folder of their compiler: an interrupted run goes on where it was, and a
new kernel costs its own texts alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from twinstep.replay.corpus.case import CASES, Case
from twinstep.replay.corpus.kernels import load
from twinstep.replay.corpus.store import DATA, ROOT, Corpus, Entry, write

ENVIRONMENTS = ROOT / ".corpus-venv"
KEPT = "texts.jsonl"


@dataclass(frozen=True)
class Compiler:
    """One compiler and what must be installed for it."""

    name: str
    packages: tuple[str, ...]
    module: str
    libraries: str = ""


COMPILERS = (
    *(
        Compiler(f"triton-{version}", (f"triton=={version}",), "compile_triton")
        for version in ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
    ),
    Compiler(
        "nvrtc-12.9",
        ("cuda-bindings==12.9.10", "cuda-pathfinder==1.9.0", "nvidia-cuda-nvrtc-cu12==12.9.86"),
        "compile_cuda",
        "nvidia/cuda_nvrtc/lib",
    ),
    Compiler(
        "nvrtc-13.5",
        ("cuda-bindings==13.5.0", "cuda-pathfinder==1.9.0", "nvidia-cuda-nvrtc==13.5.37"),
        "compile_cuda",
        "nvidia/cu13/lib",
    ),
)


def install(compiler: Compiler, environments: Path) -> Path:
    """The folder of a compiler, filled on first use."""
    folder = environments / compiler.name
    done = folder / "complete"
    if not done.exists():
        print(f"{compiler.name}: installing {' '.join(compiler.packages)}", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        subprocess.run([*pip, "--target", str(folder), *compiler.packages], check=True)
        done.touch()
    return folder


def compile_all(compiler: Compiler, environments: Path, also: Sequence[str]) -> dict[str, object]:
    """The texts that one compiler makes of every kernel that it can take."""
    folder = install(compiler, environments)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "rows.json"
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
            "TRITON_CACHE_DIR": str(Path(scratch) / "cache"),
        }
        if compiler.libraries:
            environment["LD_LIBRARY_PATH"] = str(folder / compiler.libraries)
        module = f"twinstep.replay.corpus.{compiler.module}"
        subprocess.run(
            [sys.executable, "-m", module, str(out), str(folder / KEPT), *also],
            env=environment,
            cwd=ROOT,
            check=True,
        )
        found: dict[str, object] = json.loads(out.read_text())
    check_compiler(compiler.name, found)
    rows = cast(list[object], found["rows"])
    print(f"{compiler.name}: {len(rows)} texts, {found['made']} of them made now", flush=True)
    return found


def check_compiler(name: str, found: dict[str, object]) -> None:
    """Refuse what another compiler made, for instance one of the set-up's own.

    Raises:
        RuntimeError: naming both.
    """
    tools = sorted(cast(dict[str, object], found["tools"]))
    if tools != [name]:
        raise RuntimeError(f"compiled with {', '.join(tools)}, but should be with {name} [corpus]")


def source_text(case: Case) -> str:
    """The source of a kernel: of the jitted function, or the CUDA C++ file."""
    if case.source:
        return (Path(__file__).parent / "cuda" / case.source).read_text()
    return str(case.kernel.src)  # type: ignore[attr-defined]


def described(case: Case) -> dict[str, object]:
    """The manifest's record of a case."""
    return {
        "source": hashlib.sha256(source_text(case).encode()).hexdigest(),
        "signature": dict(case.signature),
        "constants": dict(case.constants),
        "options": dict(case.options),
        "unaligned": list(case.unaligned),
        "grid": list(case.grid),
        "block": list(case.block),
    }


def collected(results: Iterable[dict[str, object]], also: Sequence[str] = ()) -> Corpus:
    """All rows in one corpus."""
    load(also)
    tools: dict[str, dict[str, str]] = {}
    entries: list[Entry] = []
    bodies: dict[str, str] = {}
    for made in results:
        tools.update(made["tools"])  # type: ignore[call-overload]
        for row in made["rows"]:  # type: ignore[attr-defined]
            text = row.pop("text")
            bodies[row["body"]] = text
            entries.append(Entry(**row))
    order = sorted(entries, key=lambda e: (e.case, e.compiler, e.sm))
    sources = {name: described(case) for name, case in sorted(CASES.items())}
    return Corpus(dict(sorted(tools.items())), sources, tuple(order), bodies)


def make(
    environments: Path = ENVIRONMENTS, also: Sequence[str] = (), folder: Path = DATA
) -> Corpus:
    """Compile everything and write it."""
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda compiler: compile_all(compiler, environments, also), COMPILERS)
        results = list(made)
    corpus = collected(results, also)
    write(corpus, folder)
    return corpus
