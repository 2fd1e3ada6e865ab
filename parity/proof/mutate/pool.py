"""Judge many subjects on several processes; one that kills its process kills nothing else."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

import torch

from twinstep.parity.proof.mutate.copies import CACHE
from twinstep.parity.proof.mutate.judging import Profile, verdict_on
from twinstep.parity.proof.mutate.verdict import End, Kind, Subject, Verdict
from twinstep.parity.runner.shared import share

# What a process has translated for replay stays in its memory: new processes after this many.
BATCH = 200


def cores() -> int:
    """Processes to use by default."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2, 16)


def verdicts(subjects: Sequence[Subject], profile: Profile, jobs: int) -> Iterator[Verdict]:
    """A verdict for each subject, in the order in which they are reached."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE] = folder
        try:
            if jobs == 1:
                yield from (verdict_on(subject, profile) for subject in subjects)
            else:
                for start in range(0, len(subjects), BATCH * jobs):
                    yield from _spread(subjects[start : start + BATCH * jobs], profile, jobs)
        finally:
            del os.environ[CACHE]


def _spread(subjects: Sequence[Subject], profile: Profile, jobs: int) -> Iterator[Verdict]:
    """Those under way when a process died are judged again, each in a process of its own."""
    orphans: list[Subject] = []
    with _pool(jobs) as pool:
        waiting: dict[Future[Verdict], Subject] = {
            pool.submit(verdict_on, subject, profile): subject for subject in subjects
        }
        for future in as_completed(waiting):
            try:
                yield future.result()
            except BrokenProcessPool:
                orphans.append(waiting[future])
    for subject in orphans:
        yield _alone(subject, profile)


def _alone(subject: Subject, profile: Profile) -> Verdict:
    with _pool(1) as pool:
        try:
            return pool.submit(verdict_on, subject, profile).result()
        except BrokenProcessPool:
            harmless = subject.kind is Kind.HARMLESS
            return Verdict(
                subject=subject,
                operation="",
                end=End.REJECTED if harmless else End.KILLED,
                says=subject.name,
                reason="it killed its process",
            )


def prepare() -> None:
    """Prepare a worker process."""
    torch.set_num_threads(1)
    share()
    # A compiler reports on source that is wrong on purpose: of no interest.
    warnings.simplefilter("ignore")


def _pool(jobs: int) -> ProcessPoolExecutor:
    # Not fork: torch's threads do not survive it.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(
        jobs,
        mp_context=context,
        initializer=prepare,
    )
