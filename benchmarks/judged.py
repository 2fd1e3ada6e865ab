"""Part: every kernel of ours, judged on the GPU by every law."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.part import Broken, Figures, require_gpu


def run() -> Figures:
    """Run `parity run` on cuda; its verdict and how many cells had which outcome."""
    require_gpu()
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger.json"
        command = [sys.executable, "-m", "parity", "run", "--engine", "cuda", "--json", str(ledger)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
        text = ledger.read_text() if ledger.exists() else ""
    return verdict(done.returncode, text)


def verdict(status: int, text: str) -> Figures:
    """What a run means: its exit status, and the ledger that it wrote.

    Raises:
        Broken: the run did not end with every law kept.
    """
    document = json.loads(text) if text else {"verdict": "no ledger was written"}
    if status:
        raise Broken(f"parity run --engine cuda ended with {status}: {document['verdict']}")
    return {key: document[key] for key in ("verdict", "counts", "seconds", "environment")}
