"""Part: every kernel of ours, judged on the GPU by every law, and faults that only a GPU shows.

A process for each operation and class, some at a time: the judge spends its time in Python. Large
tensors do not fit twice, and are judged last, one after the other.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from twinstep.benchmarks import part
from twinstep.benchmarks.part import TAIL, Broken, Figures, Job

ALONE = "large_index"
LEFT_OUT: tuple[str, ...] = ()
ONLY: tuple[str, ...] = ()
LARGE: tuple[str, ...] = ()  # kernels that ALONE judges; empty means all
# Each has a context and a pool on the GPU.
PROCESSES = min(8, os.cpu_count() or 1)


def run() -> Iterator[Figures]:
    """Judge every operation and class on cuda; which is broken is known as each ends.

    Raises:
        Broken: a law is broken, or something could not be judged.
    """
    wrong: list[str] = []
    rows: dict[str, Sequence[str]] = {**subjects()}
    if ALONE not in LEFT_OUT:
        rows[ALONE] = LARGE
    with tempfile.TemporaryDirectory() as folder:
        files = {subject: Path(folder) / f"{subject}.json" for subject in rows}
        shared = [subject for subject in rows if subject != ALONE]
        for some, at_once in ((shared, PROCESSES), ([*rows.keys() - shared], 1)):
            jobs = [job_of(subject, rows[subject], files[subject]) for subject in some]
            for number, (status, output) in part.run_jobs(jobs, at_once):
                file = files[some[number]]
                figures = verdict(status, file.read_text() if file.exists() else "", output)
                wrong += [f"{some[number]} {figures['wrong']}"] if "wrong" in figures else []
                yield {some[number]: figures}
    yield {"planted": planted()}
    if wrong:
        raise Broken(f"{len(wrong)} runs are not clean: {'; '.join(wrong)}")


def subjects() -> dict[str, list[str]]:
    """Names of kernels by operation, and of classes by themselves, of all that run on cuda."""
    from twinstep.parity.registry.house_kernels import register_house
    from twinstep.parity.registry.kernels import kernels
    from twinstep.parity.sequences.house_optimizers import register_our_optimizers
    from twinstep.parity.sequences.registry import twins

    register_house()
    register_our_optimizers()
    found = {twin.name: [twin.name] for twin in twins() if "cuda" in twin.engines}
    for kernel in kernels():
        if "cuda" in kernel.engines:
            found.setdefault(kernel.operation.name, []).append(kernel.name)
    return {name: row for name, row in found.items() if not ONLY or name in ONLY}


def job_of(subject: str, kernels: Sequence[str], ledger: Path) -> Job:
    """`parity run` on cuda.

    Args:
        subject: an operation or a class; ALONE is that law.
        kernels: by name; empty means all.
        ledger: file for all cells.
    """
    from twinstep.parity.laws import LAWS

    laws = [name for name in LAWS if name not in (ALONE, *LEFT_OUT)]
    if subject == ALONE:
        laws = [ALONE]
    elif subject in kernels:  # a class has laws of its own
        laws = []
    words = [word for name in kernels for word in ("--kernel", name)]
    words += [word for name in laws for word in ("--law", name)]
    return Job("parity", ["run", "--engine", "cuda", *words, "--json", str(ledger)])


def verdict(status: int | None, text: str, output: str = "") -> Figures:
    """The figures of a run, by exit status and ledger; `wrong` holds why it is not clean."""
    document = json.loads(text) if text else {"verdict": "no ledger was written"}
    figures = {key: document[key] for key in ("verdict", "counts", "seconds") if key in document}
    if status:
        figures["wrong"] = f"ended with {status}: {document['verdict']}"
        figures["output"] = output[-TAIL:]
    return figures


def planted() -> list[str]:
    """Judge the wrong kernels that need a GPU; the names of all of them.

    Raises:
        Broken: one is not rejected by its own law, or by another law too.
    """
    from twinstep.parity.laws import LAWS
    from twinstep.parity.proof.corpus.judged import judged
    from twinstep.parity.proof.corpus.wrong_by_device import SHELF
    from twinstep.parity.records.ledger import Status

    laws = tuple(name for name in LAWS if name not in LEFT_OUT)
    for entry in SHELF:
        broken = {cell.key.law for cell in judged(entry, laws=laws).with_status(Status.FAILED)}
        if broken != {entry.law}:
            found = ", ".join(sorted(broken)) or "no law"
            raise Broken(f"{entry.name} breaks {found}, but should break {entry.law} alone")
    return [entry.name for entry in SHELF]
