"""Everything that only a GPU can show, in one offline command.

    python -m twinstep.benchmarks.gpu_check

Runs its parts in order of what they are worth, each in a process of its own with a time limit, so
that a kernel that hangs or corrupts its context ends one part and not the check. All is in one
file, `gpu-check.json` in the folder named by the environment variable OUT; it is written anew as
each part ends, and holds the figures of a part that was stopped half-way. Beside each result
stands its prediction, from `benchmarks/results/gpu-check.json`. A part that this machine cannot
run is skipped by name with the reason.

Exit codes: 0 all parts passed, or no GPU is here; 1 a part failed, or torch cannot use the GPU;
2 wrong usage; 3 nothing failed, but on a GPU a part was skipped.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from twinstep.benchmarks import part
from twinstep.benchmarks.part import ROOT, TAIL, Broken, Figures, Job, Part, Skipped
from twinstep.parity.records.errors import EXIT_USAGE

TOTAL_SECONDS = 470.0
PREDICTED = ROOT / "benchmarks" / "results" / "gpu-check.json"


@dataclass(frozen=True)
class Row:
    """One part.

    Attributes:
        name: of the part.
        module: under `benchmarks`, with a function `run`.
        seconds: that are kept for it; it may also take what those before it have saved.
        shows: what passing means.
    """

    name: str
    module: str
    seconds: float
    shows: str


# Most valuable knowledge first. What the others need is compiled before.
ROWS = (
    Row("compile", "compiled", 45, "all variants of our kernels compile and load"),
    Row("parity", "judged", 180, "our kernels keep every law on cuda, planted faults do not"),
    Row("engines", "engines", 45, "exact kernels leave the same bits on cuda and on replay"),
    Row(
        "graph", "graph", 25, "a captured step equals the eager one, and no step waits for the GPU"
    ),
    Row("opcodes", "opcodes", 20, "instructions compute the same bits on cuda and on replay"),
    Row("timing", "timing", 75, "time of kernels and steps against a copy and against peers"),
    Row("large", "large", 30, "tensors past 2^31 elements are updated and summed to the last one"),
    Row("sanitizer", "sanitizer", 50, "compute-sanitizer finds no bad access and no race"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts, or in a child process one of them."""
    parser = argparse.ArgumentParser(
        prog="python -m twinstep.benchmarks.gpu_check", description=__doc__
    )
    names = [row.name for row in ROWS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", default=names)
    parser.add_argument("--part", nargs=2, metavar=("PART", "FILE"), help=argparse.SUPPRESS)
    try:
        options = parser.parse_args(arguments)
    except SystemExit as left:  # argparse has printed the reason, or the help
        return left.code if isinstance(left.code, int) else EXIT_USAGE
    if options.part:
        name, file = options.part
        return run_here(next(row for row in ROWS if row.name == name), Path(file))
    out = Path(os.environ.get("OUT") or "out")
    out.mkdir(parents=True, exist_ok=True)
    return run_all([row for row in ROWS if row.name in options.only], out / "gpu-check.json")


def run_all(rows: Sequence[Row], file: Path) -> int:
    """Run parts in child processes, print one line for each, and write the file after each."""
    # Imported here: a child process that runs one part has no use for it.
    from twinstep.benchmarks.stamp import stamp

    absent, refused = gpu_problem()
    document: Figures = {"schema": 2, "machine": stamp(), "parts": []}
    results = cast(list[Figures], document["parts"])
    predicted = predictions()
    deadline = time.monotonic() + TOTAL_SECONDS
    for place, row in enumerate(rows):
        kept = sum(later.seconds for later in rows[place + 1 :])
        if refused or absent:
            result = outcome(row, "failed" if refused else "skipped", refused or absent)
        else:
            result = run_child(row, deadline - time.monotonic() - kept)
        results.append({**result, "predicted": predicted.get(row.name)})
        write(file, document)
        reason = f": {result['reason']}" if result.get("reason") else ""
        print(f"{row.name:10} {result['status']:8} {result['seconds']:6.1f} s{reason}", flush=True)
    counts = {
        status: sum(result["status"] == status for result in results)
        for status in ("passed", "skipped", "failed")
    }
    print(", ".join(f"{count} {status}" for status, count in counts.items()) + f"; {file}")
    return 1 if counts["failed"] else 3 if counts["skipped"] and not absent else 0


def gpu_problem() -> tuple[str, str]:
    """Reason why there is no GPU, and reason why one cannot be used; empty where there is none."""
    try:
        part.require_gpu()
    except Skipped as skipped:
        return str(skipped), ""
    except Broken as broken:
        return "", str(broken)
    return "", ""


def predictions() -> dict[str, Figures]:
    """Predicted seconds and figures of each part, by name."""
    document = json.loads(PREDICTED.read_text())
    return {row["name"]: row["predicted"] for row in document["parts"]}


def run_child(row: Row, seconds: float) -> Figures:
    """Run one part in a process group of its own and return its result, whatever happens to it."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{row.name}.json"
        if seconds <= 0:
            return outcome(row, "failed", f"no time left of {TOTAL_SECONDS:g} s for all parts")
        job = Job("benchmarks.gpu_check", ["--part", row.name, str(file)], seconds)
        status, output = part.run_job(job)
        took = time.monotonic() - started
        result = outcome(row, "failed", "")
        if file.exists():
            result = json.loads(file.read_text())
        if result["status"] == "unfinished" or not file.exists():
            ended = f"ended with status {status}" if status is not None else "was stopped"
            result = {**result, "status": "failed", "reason": f"{ended} after {took:.0f} s"}
    if result["status"] == "failed":
        result["output"] = output[-TAIL:]
    return {**result, "seconds": round(took, 1), "limit": round(seconds, 1)}


def run_here(row: Row, file: Path) -> int:
    """Run one part in this process, and write what is known after each of its figures."""
    figures: Figures = {}
    try:
        part.require_gpu()
        run: Part = importlib.import_module(f"{__package__}.{row.module}").run
        for more in run():
            figures |= more
            write(file, outcome(row, "unfinished", "") | {"figures": figures})
        result = outcome(row, "passed", "")
    except Skipped as skip:
        result = outcome(row, "skipped", str(skip))
    except Broken as broken:
        result = outcome(row, "failed", str(broken))
    except Exception as error:
        traceback.print_exc()
        result = outcome(row, "failed", f"{type(error).__name__}: {error}")
    write(file, result | ({"figures": figures} if figures else {}))
    return 0


def outcome(row: Row, status: str, reason: str) -> Figures:
    """The result of a part without its figures."""
    return {
        "name": row.name,
        "shows": row.shows,
        "status": status,
        "reason": reason,
        "seconds": 0.0,
    }


def write(file: Path, figures: Figures) -> None:
    """Write one JSON file, readable by people too, all at once."""
    aside = file.with_suffix(".new")
    aside.write_text(json.dumps(figures, indent=1) + "\n")
    aside.replace(file)


if __name__ == "__main__":
    sys.exit(main())
