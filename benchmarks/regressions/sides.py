"""Processes that measure checkouts, seen from the process that compares them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import twinstep
from twinstep.benchmarks.regressions import side
from twinstep.parity.records.errors import UsageError

HERE = Path(str(twinstep.__file__)).parents[1]
# OpenMP's idle threads wait for some 10 µs, then sleep: long enough for peers that start their
# threads for every tensor, and over before another row's turn. Sets of Python keep their order.
QUIET = {"GOMP_SPINCOUNT": "1000", "PYTHONHASHSEED": "0"}


Answer = dict[str, Any]


class SideFailed(Exception):
    """A side could not do what it was asked; the message is its own."""


@dataclass(frozen=True)
class Checkout:
    """A checkout that one side measures.

    Attributes:
        name: as reports call it.
        root: of the project.
        file: of a user, with kernels; empty for ours.
    """

    name: str
    root: Path
    file: str = ""


class Process:
    """A running side; requests are its methods, by name."""

    def __init__(self, checkout: Checkout, threads: int = 0) -> None:
        self.checkout = checkout
        environment = {**os.environ, **QUIET}
        # With it every process would compile anew what it imports: half of what a start costs.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        if threads:
            environment[side.THREADS] = str(threads)
        command = [sys.executable, "-P", str(side.__file__), str(checkout.root), checkout.file]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by __exit__
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=checkout.root,
            env=environment,
        )

    def ask(self, do: str, **request: object) -> Answer:
        """The answer to a request.

        Raises:
            SideFailed: the side raised an error or died.
        """
        return asked([self], do, **request)[0]

    def tell(self, do: str, **request: object) -> None:
        """Send a request; its answer has to be heard before the next."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"do": do, **request}), file=self.process.stdin, flush=True)

    def hear(self) -> Answer:
        """An answer, or an error under that name."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer: Answer = json.loads(line) if line else {"error": self._last_words()}
        return answer

    def _last_words(self) -> str:
        self.process.wait()
        self.log.seek(0)
        said = self.log.read().strip().splitlines()[-1:]
        return " ".join([f"its process ended with {self.process.returncode}", *said])

    def __enter__(self) -> Process:
        checked([self], [self.hear()])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self.process.stdin is not None:
            self.process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=20)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.log.close()


def asked(sides: Sequence[Process], do: str, **request: object) -> list[Answer]:
    """The answers of several sides that do the same at the same time.

    Raises:
        SideFailed: a side raised an error or died.
    """
    for one in sides:
        one.tell(do, **request)
    return checked(sides, [one.hear() for one in sides])


def checked(sides: Sequence[Process], answers: list[Answer]) -> list[Answer]:
    """The answers, if none is an error.

    Raises:
        SideFailed: one is.
    """
    for one, answer in zip(sides, answers, strict=True):
        if "error" in answer:
            raise SideFailed(f"{one.checkout.name}: {answer['error']}")
    return answers


@contextlib.contextmanager
def started(checkouts: Sequence[Checkout], threads: int = 0) -> Iterator[list[Process]]:
    """Running sides, which start at the same time.

    Raises:
        SideFailed: one could not start.
    """
    with contextlib.ExitStack() as stack:
        sides = [stack.push(Process(checkout, threads)) for checkout in checkouts]
        checked(sides, [one.hear() for one in sides])
        yield sides


@contextlib.contextmanager
def checkouts(baseline: str, file: str) -> Iterator[tuple[Checkout, Checkout]]:
    """Baseline and candidate; a revision of git is checked out into a folder of its own.

    Args:
        baseline: a folder, a file, or a revision of the repository that holds the candidate.
        file: a user's file; empty for this project.

    Raises:
        UsageError: there is no such folder or revision, or nothing differs from it.
    """
    candidate = Checkout("candidate", HERE, str(Path(file).resolve()) if file else "")
    if Path(baseline).exists():
        place = Path(baseline).resolve()
        if file and place.is_file():
            yield Checkout("baseline", HERE, str(place)), candidate
        else:
            yield _in_folder(place, candidate), candidate
        return
    top = _top(candidate)
    others = _git(top, "ls-files", "--others", "--exclude-standard")
    if not _git(top, "diff", "--name-only", baseline, "--") + others:
        raise UsageError(
            f"nothing in {top} differs from {baseline}; name an older one [--baseline]"
        )
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "baseline"
        _git(top, "worktree", "add", "--detach", "--quiet", str(place), baseline)
        try:
            yield _in_folder(place, candidate), candidate
        finally:
            _git(top, "worktree", "remove", "--force", str(place))


def _in_folder(place: Path, candidate: Checkout) -> Checkout:
    """The baseline in a checkout: the same file there, or the project itself."""
    if not candidate.file:
        if not (place / "twinstep").is_dir():
            raise UsageError(f"{place} is no checkout of this project [--baseline]")
        return Checkout("baseline", place)
    file = Path(candidate.file).relative_to(_top(candidate))
    if not (place / file).is_file():
        raise UsageError(f"{file} is not in the baseline, so nothing can be compared [--baseline]")
    return Checkout("baseline", HERE, str(place / file))


def _top(candidate: Checkout) -> Path:
    """Root of the repository that holds the candidate."""
    start = Path(candidate.file).parent if candidate.file else candidate.root
    return Path(_git(start, "rev-parse", "--show-toplevel").strip())


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["git failed"])[-1]
        raise UsageError(f"git {words[0]}: {reason} [--baseline]")
    return done.stdout
