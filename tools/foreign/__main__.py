"""Triton's own tests on replay: run, or go on running, and count the outcomes by reason."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.foreign.outcomes import read
from tools.source import ROOT

FILES = (
    *("test_core", "test_conversions", "test_standard", "test_random", "test_libdevice"),
    *("test_tuple", "test_annotations", "test_block_pointer"),
)
"""Modules of Triton's `python/test/unit/language` whose tests run kernels."""


def options() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="python -m tools.foreign", description=__doc__)
    parser.add_argument("checkout", type=Path, help="A checkout of Triton.")
    parser.add_argument("--files", nargs="+", default=FILES, help="Modules of tests.")
    parser.add_argument("--outcomes", type=Path, default=ROOT / "out" / "foreign.jsonl")
    parser.add_argument("--limit", type=float, default=30.0, help="Seconds for each case.")
    parser.add_argument("--seconds", type=float, default=540.0, help="Seconds for all.")
    parser.add_argument("--jobs", default="auto", help="Processes.")
    return parser


def main() -> int:
    """Exit code 1 where an outcome is bad."""
    given = options().parse_args()
    tests, outcomes = given.checkout.resolve() / "python" / "test", given.outcomes.resolve()
    files = [tests / "unit" / "language" / f"{name}.py" for name in given.files]
    if missing := [str(path) for path in files if not path.exists()]:
        raise SystemExit(f"No tests of Triton at {', '.join(missing)}.")
    outcomes.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=no",
        "--no-header",
        "-rN",
        "-W",
        "ignore",
    ]
    command += ["-p", "tools.foreign.plugin", "-p", "no:cacheprovider", "-c", os.devnull]
    command += [f"--rootdir={tests}", f"--outcomes={outcomes}", f"--known={len(read(outcomes))}"]
    command += [f"--limit={given.limit}", f"--seconds={given.seconds}", f"-n{given.jobs}"]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as elsewhere:  # tests leave files where they run
        environment = os.environ | {"PYTHONPATH": paths}
        return subprocess.run(
            [*command, *map(str, files)], cwd=elsewhere, env=environment, check=False
        ).returncode


if __name__ == "__main__":
    raise SystemExit(main())
