"""Part: every kernel of ours, judged on the GPU by every law, and faults that only a GPU shows."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from twinstep.benchmarks.part import Broken, Figures


def run() -> Figures:
    """Run `parity run` on cuda; its verdict and how many cells had which outcome."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger.json"
        command = [
            sys.executable,
            "-m",
            "twinstep.parity",
            "run",
            "--engine",
            "cuda",
            "--json",
            str(ledger),
        ]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
        text = ledger.read_text() if ledger.exists() else ""
    figures = verdict(done.returncode, text)
    return {**figures, "planted": planted()}


def planted() -> list[str]:
    """Judge the wrong kernels that need a GPU; the names of all of them.

    Raises:
        Broken: one is not rejected by its own law, or by another law too.
    """
    from twinstep.parity.proof.corpus.judged import judged
    from twinstep.parity.proof.corpus.wrong_by_device import SHELF
    from twinstep.parity.records.ledger import Status

    for entry in SHELF:
        broken = {cell.key.law for cell in judged(entry).with_status(Status.FAILED)}
        if broken != {entry.law}:
            found = ", ".join(sorted(broken)) or "no law"
            raise Broken(f"{entry.name} breaks {found}, but should break {entry.law} alone")
    return [entry.name for entry in SHELF]


def verdict(status: int, text: str) -> Figures:
    """The figures of a run, from its exit status and the ledger that it wrote.

    Raises:
        Broken: the run did not end with every law kept.
    """
    document = json.loads(text) if text else {"verdict": "no ledger was written"}
    if status:
        raise Broken(f"parity run --engine cuda ended with {status}: {document['verdict']}")
    return {key: document[key] for key in ("verdict", "counts", "seconds", "environment")}
