"""Faults in the arithmetic of our kernels, put before the prover: none may stay proved.

A fault counts as noticed when some situation of an operation that reaches it is no longer proved.
One whose compiled code equals the original's in every situation is none.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from pathlib import Path

from twinstep.parity.proof.mutate.copies import CACHE, changed, kernel_of
from twinstep.parity.proof.mutate.pool import prepare
from twinstep.parity.proof.mutate.same_code import compiled, same_code
from twinstep.parity.proof.mutate.sites import Mutant, mutants, reaching
from twinstep.parity.prove.rows import prove_situation
from twinstep.parity.prove.situations import LARGE, Situation, choices
from twinstep.parity.records.proof import PROVED, UNSUPPORTED, Verdict
from twinstep.parity.registry.kernels import Kernel

RULES: tuple[str, ...] = ("operator", "comparison", "condition", "constant", "narrower type")
RULES += ("fast division", "fast root", "under the root")
FILES = ("_arith.py", "_lamb.py", "clip.py", "loss_scale.py")
"""Files of arithmetic alone; elsewhere it is in functions whose name ends with `_tile`."""
DTYPES = ("bf16", "mixed", "scalar", "bf16-pure")
"""The first of these that an operation has is what a fault is shown on."""
SUMS = ("_limbs.py", "_squares.py", "reduce.py")
"""Files of sums, which a proof takes for right."""
SIZES = {"flat": (70,), "list": (150, 37), "": ()}
SAME_CODE = "same code"
SECONDS = 60.0
BATCH = 40
"""Faults after which a process is renewed: it keeps what it has compiled."""
UNPROVED = ("global_norm",)
"""Operations that consist of sums, which have laws of their own."""


@dataclass(frozen=True)
class Outcome:
    """Verdict of the prover on a fault.

    Attributes:
        name: of the mutant.
        word: of the first situation that is not proved; else `proved`, or `same code`.
        where: that situation, or how many were proved.
    """

    name: str
    word: str
    where: str


def faults(operations: Sequence[str]) -> list[str]:
    """Names of the faults in the arithmetic of these operations, of all if none is named."""
    return [
        name
        for name, mutant in mutants().items()
        if mutant.jitted
        and mutant.rule in RULES
        and (Path(mutant.file).name in FILES or mutant.function.endswith("_tile"))
        and Path(mutant.file).name not in SUMS
        and (not operations or set(operations) & set(mutant.operations))
        and set(mutant.operations) - set(UNPROVED)
    ]


def outcome_of(name: str) -> Outcome:
    """Plant a fault in a copy of our kernels and prove what it reaches.

    First where any two choices of options meet, on one dtype combination; a fault that is proved
    there, and whose compiled code differs, is put where any two of these and dtypes meet.
    """
    mutant, proved = mutants()[name], 0
    for chosen in (_small, _on_every_dtype):
        with tempfile.TemporaryDirectory() as folder:
            with changed(mutant, Path(folder)):
                for situation in chosen(mutant):
                    verdict = _verdict(situation)
                    if verdict.word != PROVED:
                        where = f"{situation.kernel.operation.name} {situation.words}"
                        return Outcome(name, verdict.word, where)
                    proved += 1
                made = compiled()
            reached = {place: code for place, code in made.items() if place in reaching(mutant)}
            if same_code(reached):
                return Outcome(name, SAME_CODE, f"{proved} situations")
    return Outcome(name, PROVED, f"{proved} situations")


def situations(mutant: Mutant) -> Iterator[Situation]:
    """Every choice of options and dtypes of every operation that a fault reaches; a whole chunk."""
    for operation in mutant.operations:
        if operation not in UNPROVED:
            kernel: Kernel = kernel_of(operation)
            for dtype in kernel.dtypes:
                for layout in kernel.layouts or ("",):
                    for one in choices(kernel.operation):
                        large = LARGE.get(layout, ())
                        yield Situation(kernel, dtype, layout, large, True, one)


def _small(mutant: Mutant) -> Iterator[Situation]:
    """Situations on one dtype combination, of few elements, in which any two choices meet."""
    for known in _by_operation(mutant):
        have = {situation.dtype for situation in known}
        dtype = next((d for d in DTYPES if d in have), known[0].dtype)
        for one in meetings([s for s in known if s.dtype == dtype]):
            yield replace(one, sizes=SIZES[one.layout])


def _on_every_dtype(mutant: Mutant) -> Iterator[Situation]:
    """Situations of a whole chunk in which any two of dtypes, layouts and choices meet."""
    for known in _by_operation(mutant):
        yield from meetings(known)


def _by_operation(mutant: Mutant) -> Iterator[list[Situation]]:
    for _, known in groupby(situations(mutant), lambda s: s.kernel.operation.name):
        yield list(known)


def meetings(left: list[Situation]) -> Iterator[Situation]:
    """Of these enough that any two choices that meet in one of them do."""
    met: set[frozenset[object]] = set()
    while left:
        best = max(left, key=lambda s: len(pairs(s) - met))
        if not pairs(best) - met:
            return
        met |= pairs(best)
        yield best
        left = [situation for situation in left if situation is not best]


def pairs(situation: Situation) -> set[frozenset[object]]:
    """Pairs of choices that meet in a situation, dtype and layout among them."""
    every = [("dtype", situation.dtype), ("layout", situation.layout), *situation.options.items()]
    return {frozenset(pair) for pair in combinations(every, 2)}


def _verdict(situation: Situation) -> Verdict:
    return prove_situation(situation, SECONDS)


def outcomes(names: Sequence[str], jobs: int) -> Iterator[Outcome]:
    """Verdicts on faults, from processes that are renewed after some of them."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE] = folder
        try:
            for start in range(0, len(names), BATCH * jobs):
                yield from _batch(names[start : start + BATCH * jobs], jobs)
        finally:
            del os.environ[CACHE]


def _batch(names: Sequence[str], jobs: int) -> Iterator[Outcome]:
    left = list(names)
    while left:
        with _pool(jobs) as pool:
            futures = [pool.submit(outcome_of, name) for name in left]
            try:
                for future in futures:
                    yield future.result()
                    left.pop(0)
            except BrokenProcessPool:
                if jobs == 1:
                    yield Outcome(left.pop(0), UNSUPPORTED, "it ends its process")
        jobs = 1


def _pool(jobs: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, mp_context=context, initializer=prepare)
