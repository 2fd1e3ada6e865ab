"""`parity prove-mutants`: faults in the arithmetic of our kernels, put before the prover."""

from __future__ import annotations

import json as json_module
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from twinstep.parity.proof.mutate.pool import cores
from twinstep.parity.proof.mutate.proving import SAME_CODE, Outcome, faults, outcomes
from twinstep.parity.proof.mutate.still_proved import STILL_PROVED
from twinstep.parity.records.errors import EXIT_BROKEN, EXIT_KEPT
from twinstep.parity.records.proof import PROVED, WORST


def run(operations: Sequence[str], every: int, jobs: int | None, json: str | None) -> int:
    """Prove every so many of the faults; the exit code."""
    started = time.perf_counter()
    names = faults(operations)[::every]
    console = Console(stderr=json == "-", highlight=False, soft_wrap=True)
    found: list[Outcome] = []
    for outcome in outcomes(names, jobs or cores()):
        found.append(outcome)
        why = ""
        if outcome.word == PROVED:
            why = STILL_PROVED.get(outcome.name, "no argument why it makes no difference")
            why = f": {why}"
        console.print(f"{outcome.word:12} {outcome.name} [{outcome.where}]{why}", markup=False)
    counts = Counter(outcome.word for outcome in found)
    total = ", ".join(f"{counts[w]} {w}" for w in (*WORST, SAME_CODE) if counts[w])
    seconds = time.perf_counter() - started
    console.print(f"{len(found)} faults in the arithmetic: {total} ({seconds:.0f} s)")
    if json is not None:
        text = json_module.dumps([asdict(outcome) for outcome in found], indent=1)
        print(text) if json == "-" else Path(json).write_text(text + "\n")
    unexplained = [o for o in found if o.word == PROVED and o.name not in STILL_PROVED]
    return EXIT_BROKEN if unexplained else EXIT_KEPT
