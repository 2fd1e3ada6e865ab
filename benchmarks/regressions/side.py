"""One side of a comparison: a process that measures one checkout and answers on a pipe.

    python benchmarks/regressions/side.py ROOT [FILE]

What is measured comes from ROOT; what measures comes from the checkout of this file, so that both
sides are measured alike. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from twinstep.benchmarks.beside.subject import Subject
    from twinstep.parity.registry.kernels import Kernel

Answer = dict[str, Any]
THREADS = "TWINSTEP_BENCH_THREADS"
HARNESS = Path(__file__).resolve().parents[1]


def measure_from(root: str) -> None:
    """Take `twinstep` from ROOT, but `twinstep.benchmarks` from here."""
    sys.path.insert(0, root)
    package = importlib.import_module("twinstep")
    file = HARNESS / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        "twinstep.benchmarks", file, submodule_search_locations=[str(HARNESS)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["twinstep.benchmarks"] = module
    package.benchmarks = module  # type: ignore[attr-defined]
    spec.loader.exec_module(module)


class Side:
    """Answers requests about the registered kernels of one checkout."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.kernels = self._registered()
        self.subject: Subject | None = None

    def _registered(self) -> list[Kernel]:
        from twinstep.parity.registry.house_kernels import register_house
        from twinstep.parity.registry.kernels import kernels
        from twinstep.parity.runner.load_file import load_file

        if self.file:
            return load_file(self.file).kernels
        register_house()
        return list(kernels())

    def times(self, shapes: list[list[int]], operations: list[str]) -> Answer:
        """Labels of what can be timed: kernels at these shapes, and our classes on the host."""
        from twinstep.benchmarks.regressions.timed import labels

        chosen, classes = self._chosen(operations)
        return {"labels": labels(chosen, shapes, classes)}

    def open(self, label: str) -> Answer:
        """Make one of them ready; how many calls make a turn."""
        from twinstep.benchmarks.regressions.timed import subject_named

        self.subject = subject_named(self.kernels, label)
        if self.subject.device.type == "cpu" and os.environ.get(THREADS) == "1":
            # Time of this process alone: what others on the machine take does not count.
            self.subject.clock = time.process_time
        self.subject.settle()
        return {"repeats": self.subject.repeats}

    def turn(self, repeats: int) -> Answer:
        """Seconds of one call, the mean of so many."""
        assert self.subject is not None
        self.subject.repeats = repeats
        return {"seconds": self.subject.turn()}

    def close(self) -> Answer:
        """Free what was ready."""
        if self.subject is not None:
            self.subject.close()
        self.subject = None
        return {}

    def counts(self, operations: list[str]) -> Answer:
        """Counts of every kernel, or those of some operations; without these our classes, too."""
        from twinstep.benchmarks.regressions.counts import counts

        chosen, classes = self._chosen(operations)
        found = counts(chosen, classes, in_process=bool(self.file))
        return {"counts": {label: asdict(counted) for label, counted in found}}

    def _chosen(self, operations: list[str]) -> tuple[list[Kernel], bool]:
        """Kernels of some operations, and whether our classes are meant, too."""
        chosen = [k for k in self.kernels if not operations or k.operation.name in operations]
        return chosen, not (self.file or operations)

    def prepare(self) -> Answer:
        """Build what rows need, so that no row's time has it."""
        from twinstep.benchmarks.beside.builds import prepare

        prepare()
        return {}

    def beside(self, group: tuple[str, str, int, int], rounds: int) -> Answer:
        """Times of all rows of a group, turn by turn."""
        from twinstep.benchmarks.beside.measure import measured

        return measured(self.kernels, group, rounds)


def serve(side: Side, requests: TextIO, answers: TextIO) -> None:
    """Answer until the requests end."""
    for line in requests:
        request = json.loads(line)
        method: Callable[..., Answer] = getattr(side, request.pop("do"))
        try:
            answer = method(**request)
        except Exception as error:  # of a kernel, a compiler, or an old checkout
            first = (str(error).splitlines() or [""])[0]
            answer = {"error": f"{type(error).__name__}: {first}"}
        print(json.dumps(answer), file=answers, flush=True)


def main(root: str, file: str = "") -> None:
    """Measure ROOT; kernels of FILE, where there is one, or else ours."""
    # Whatever a kernel prints must not meet the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    measure_from(root)
    threads = os.environ.get(THREADS)
    if threads:
        importlib.import_module("torch").set_num_threads(int(threads))
    try:
        side = Side(file)
    except Exception as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        return
    print(json.dumps({"ready": True}), file=answers, flush=True)
    serve(side, sys.stdin, answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
