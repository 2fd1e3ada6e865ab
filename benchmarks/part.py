"""Parts of the check: what they may raise, and the processes that they start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TAIL = 4000  # characters of an output that are kept
Figures = dict[str, object]
# Figures come one by one: those of a part that is stopped half-way are kept.
Part = Callable[[], Iterator[Figures]]


class Skipped(Exception):
    """This machine cannot run the part; the message is the reason, and it is reported by name."""


class Broken(Exception):
    """The part ran and found something wrong; the message says what and where."""


@dataclass(frozen=True)
class Job:
    """A module of this project that is run in a process group of its own.

    Attributes:
        module: without `twinstep.`.
        arguments: of its command line.
        seconds: its time limit; None for none.
        prefix: a command that runs it.
        environment: variables besides those of this process.
    """

    module: str
    arguments: Sequence[str] = ()
    seconds: float | None = None
    prefix: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def finished(job: Job) -> tuple[int | None, str]:
    """Exit status and output of a job; None as status where it ran past its limit."""
    command = [*job.prefix, sys.executable, "-m", f"twinstep.{job.module}", *job.arguments]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, **job.environment},
    )
    try:
        output, _ = process.communicate(timeout=job.seconds)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        # The group, not the process: a part starts processes of its own.
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return None, output


def ended(jobs: Sequence[Job], at_once: int) -> Iterator[tuple[int, tuple[int | None, str]]]:
    """Number and end of each job, as they end.

    Args:
        jobs: independent of one another.
        at_once: number of processes.
    """
    with ThreadPoolExecutor(at_once) as pool:
        started = {pool.submit(run_job, job): number for number, job in enumerate(jobs)}
        for done in as_completed(started):
            yield started[done], done.result()


# The simulated GPU of the tests puts its own ways here.
run_job = finished
run_jobs = ended


def require_gpu() -> None:
    """Require a GPU that torch can use.

    Raises:
        Skipped: there is none, or torch was built without CUDA.
        Broken: there is one, and the driver or torch refuses it.
    """
    import torch

    if torch.cuda.is_available():
        return
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except AssertionError:
        raise Skipped("no CUDA GPU here: torch was built without CUDA") from None
    except RuntimeError as error:
        sentence = str(error).split(". ")[0].split("\n")[0]
        if "no NVIDIA driver" in sentence or "No CUDA GPUs" in sentence:
            raise Skipped("no CUDA GPU here") from None
        raise Broken(f"torch cannot use the GPU: {sentence}") from None
    raise Broken("torch can use the GPU, but torch.cuda.is_available() is False")
