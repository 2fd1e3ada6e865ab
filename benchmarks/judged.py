"""Part: every kernel of ours, judged on the GPU by every law."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.part import Broken, Figures, require_gpu


def run() -> Figures:
    """Run `parity run` on cuda; its verdict and how many cells had which outcome."""
    require_gpu()
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger.json"
        command = [sys.executable, "-m", "parity", "run", "--engine", "cuda", "--json", str(ledger)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, text=True, check=False)
        counts = count_statuses(ledger.read_text()) if ledger.exists() else {}
    if done.returncode:
        raise Broken(f"parity run --engine cuda ended with {done.returncode}: {counts}")
    return {"cells": counts}


def count_statuses(text: str) -> dict[str, int]:
    """Outcome → number of cells, from the ledger in JSON Lines."""
    records = [json.loads(line) for line in text.splitlines() if line.strip()]
    return dict(Counter(record["status"] for record in records if "status" in record))
