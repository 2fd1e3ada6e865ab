"""The gate on unchanged code: how often does it fail where nothing changed?

    python -m twinstep.benchmarks.unchanged [--runs N] [--output FILE] [-- WORD ...]

Both sides are copies of the same commit. Every run is entered into the file as it ends, so that a
call goes on where the last one stopped; outcomes of another machine or version are refused.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinstep.benchmarks.regressions.sides import HERE
from twinstep.benchmarks.runs.key import differences, key_of
from twinstep.benchmarks.stamp import stamp
from twinstep.parity.records.errors import EXIT_BROKEN, EXIT_KEPT, UsageError

RUNS = 20
Document = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the gate until the file has so many runs; 1 if any of them failed.

    Raises:
        UsageError: the file is of another machine or version.
    """
    parser = argparse.ArgumentParser(prog="python -m twinstep.benchmarks.unchanged")
    parser.add_argument("--runs", type=int, default=RUNS, help="in the file at the end; default 20")
    parser.add_argument("--output", type=Path, default=Path("gate-unchanged.json"))
    parser.add_argument("words", nargs="*", help="further words of `parity bench gate`, after --")
    options = parser.parse_args(arguments)
    document = begun(options.output)
    while len(document["runs"]) < options.runs:
        document["runs"].append(one_run(options.words))
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(document, indent=1) + "\n")
        print(f"run {len(document['runs'])}: {json.dumps(document['runs'][-1])}", flush=True)
    failed = sum(bool(run["failures"]) for run in document["runs"])
    print(f"{failed} of {len(document['runs'])} runs failed")
    return EXIT_BROKEN if failed else EXIT_KEPT


def begun(file: Path) -> Document:
    """The file's document, or a new one.

    Raises:
        UsageError: its runs are of another machine or version, so these may not join them.
    """
    key = key_of()
    if not file.exists():
        return {"schema": 1, "stamp": stamp(), "key": key, "runs": []}
    document: Document = json.loads(file.read_text())
    other = differences(document["key"], key)
    if other:
        raise UsageError(f"{file} is of another machine or version: {'; '.join(other)} [--output]")
    return document


def one_run(words: Sequence[str]) -> Document:
    """One run of the gate: its failures, and how often the control was wrong."""
    load, begin = round(os.getloadavg()[0], 1), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file, same = Path(folder) / "gate.json", Path(folder) / "same"
        copied(same)
        command = [sys.executable, "-m", "twinstep.parity", "bench", "gate", "--json", str(file)]
        done = subprocess.run(
            [*command, "--baseline", str(same), *words], cwd=HERE, capture_output=True, text=True
        )
        if not file.exists():
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            return _run(load, begin, [f"the gate ended with {done.returncode}: {' '.join(last)}"])
        found = json.loads(file.read_text())
    failures = [failure["sentence"] for failure in found["failures"]]
    control = found["control"]
    highest = max((row["ratio"][0] for row in found["times"].values()), default=0.0)
    return {
        **_run(load, begin, failures),
        "alarms": control["alarms"],
        "looks": control["looks"],
        "unconfirmed": found["unconfirmed"],
        "highest_low_end": highest,
        "counts": sum(len(one["facts"]) for one in found["counts"].get("candidate", {}).values()),
    }


def _run(load: float, begin: float, failures: list[str]) -> Document:
    seconds = round(time.perf_counter() - begin)
    return {"load": load, "seconds": seconds, "failures": failures, "alarms": 0, "looks": 0}


def copied(place: Path) -> None:
    """A copy of the checkout as it is: what git tracks, changes included."""
    listed = subprocess.run(
        ["git", "-C", str(HERE), "ls-files", "-z"], capture_output=True, check=True
    )
    for name in listed.stdout.decode().split("\0"):
        if name:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(HERE / name, place / name, follow_symlinks=False)


if __name__ == "__main__":
    raise SystemExit(main())
