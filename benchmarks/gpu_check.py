"""Everything that only a GPU can show, in one offline command.

    python -m twinstep.benchmarks.gpu_check

Runs its parts in order, each in a process of its own with a time limit, so that a kernel that
hangs or corrupts its context ends one part and not the check. Results are JSON files under the
folder named by the environment variable OUT: one for each part, and `gpu-check.json` with all of
them. A part that this machine cannot run is skipped by name with the reason.

Exit codes: 0 nothing failed (parts may be skipped), 1 a part failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twinstep.benchmarks.part import Broken, Figures, Part, Skipped, require_gpu

ROOT = Path(__file__).resolve().parents[1]
TOTAL_SECONDS = 350.0
TAIL = 4000  # characters of a part's output that are kept


@dataclass(frozen=True)
class Row:
    """One part.

    Attributes:
        name: also of its result file.
        module: under `benchmarks`, with a function `run`.
        seconds: its time limit.
        shows: what passing means.
    """

    name: str
    module: str
    seconds: float
    shows: str


# Cheapest knowledge first: where the total runs out, it is the timing that is missing.
ROWS = (
    Row("parity", "judged", 110, "our kernels keep every law on cuda, planted faults do not"),
    Row("engines", "engines", 90, "exact kernels leave the same bits on cuda and on replay"),
    Row("opcodes", "opcodes", 40, "instructions compute the same bits on cuda and on replay"),
    Row("large", "large", 60, "tensors past 2^31 elements are updated and summed to the last one"),
    Row(
        "graph", "graph", 45, "a captured step equals the eager one, and no step waits for the GPU"
    ),
    Row("sanitizer", "sanitizer", 120, "compute-sanitizer finds no bad access and no race"),
    Row("timing", "timing", 45, "time of update and reduce against a copy of as many bytes"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts, or in a child process one of them."""
    parser = argparse.ArgumentParser(
        prog="python -m twinstep.benchmarks.gpu_check", description=__doc__
    )
    names = [row.name for row in ROWS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", default=names)
    parser.add_argument("--part", choices=names, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    out = Path(os.environ.get("OUT") or "out")
    out.mkdir(parents=True, exist_ok=True)
    if options.part:
        row = next(row for row in ROWS if row.name == options.part)
        return run_here(row, out)
    return run_all([row for row in ROWS if row.name in options.only], out)


def run_all(rows: Sequence[Row], out: Path) -> int:
    """Run parts in child processes, print one line for each and write the summary."""
    # Imported here: a child process that runs one part has no use for it.
    from twinstep.benchmarks.stamp import stamp

    machine = stamp()
    summary: Figures = {"schema": 1, "machine": machine}
    results: list[Figures] = []
    deadline = time.monotonic() + TOTAL_SECONDS
    for row in rows:
        if machine["gpu"]:
            result = run_child(row, out, min(row.seconds, deadline - time.monotonic()))
        else:
            result = outcome(row, "skipped", "no CUDA GPU here") | {"seconds": 0.0}
        write(out / f"{row.name}.json", result)
        results.append(result)
        reason = f": {result['reason']}" if result.get("reason") else ""
        print(f"{row.name:10} {result['status']:8} {result['seconds']:6.1f} s{reason}", flush=True)
    summary["parts"] = results
    write(out / "gpu-check.json", summary)
    failed = [str(result["name"]) for result in results if result["status"] == "failed"]
    skipped = sum(result["status"] == "skipped" for result in results)
    passed = len(results) - len(failed) - skipped
    print(f"{passed} passed, {skipped} skipped, {len(failed)} failed; {out / 'gpu-check.json'}")
    return 1 if failed else 0


def run_child(row: Row, out: Path, seconds: float) -> Figures:
    """Run one part in a process group of its own and return its result, whatever happens to it."""
    file = out / f"{row.name}.json"
    file.unlink(missing_ok=True)
    started = time.monotonic()
    if seconds <= 0:
        result = outcome(row, "failed", f"no time left of {TOTAL_SECONDS:g} s for all parts")
    else:
        command = [sys.executable, "-m", "twinstep.benchmarks.gpu_check", "--part", row.name]
        status, output = run_group(command, seconds)
        if file.exists():
            result = json.loads(file.read_text())
        else:
            ended = f"ended with status {status}" if status is not None else "was stopped"
            result = outcome(row, "failed", f"{ended} after {time.monotonic() - started:.0f} s")
        if result["status"] == "failed":
            result["output"] = output[-TAIL:]
    result["seconds"] = round(time.monotonic() - started, 1)
    return dict(result)


def run_group(command: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Run a command in a new process group; None as status where it ran past its limit."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        # The group, not the process: a part starts processes of its own.
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return None, output


def run_here(row: Row, out: Path) -> int:
    """Run one part in this process and write its result file."""
    try:
        require_gpu()
        part: Part = importlib.import_module(f"{__package__}.{row.module}").run
        result = outcome(row, "passed", "")
        result["figures"] = part()
    except Skipped as skip:
        result = outcome(row, "skipped", str(skip))
    except Broken as broken:
        result = outcome(row, "failed", str(broken))
    except Exception as error:
        traceback.print_exc()
        result = outcome(row, "failed", f"{type(error).__name__}: {error}")
    write(out / f"{row.name}.json", result)
    return 0


def outcome(row: Row, status: str, reason: str) -> Figures:
    """The result of a part without its figures."""
    return {"name": row.name, "status": status, "reason": reason, "shows": row.shows}


def write(file: Path, figures: Figures) -> None:
    """Write one JSON file, readable by people too."""
    file.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
