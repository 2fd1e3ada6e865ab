"""Judge a twin on one dtype: many sequences, one cell of the ledger."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypedDict

import torch

from twinstep.parity.records.errors import CannotRun
from twinstep.parity.records.ledger import Cell, Key, Status
from twinstep.parity.records.standalone import FOLDER
from twinstep.parity.registry.engines import Engine, engine_among, running, uses_triton
from twinstep.parity.sequences.actions import Rules
from twinstep.parity.sequences.drawing import reaching, sequence
from twinstep.parity.sequences.drive import Driven, Mismatch, Sides, refusal, run
from twinstep.parity.sequences.registry import Twin
from twinstep.parity.sequences.report import failure_text, headline, kind_of
from twinstep.parity.sequences.repro import shown_again, write_repro
from twinstep.parity.sequences.shrink import shrunk
from twinstep.parity.sequences.world import Act

LAW = "sequences"
SEQUENCES = 156
# One sequence over ranks for so many on one, or more of them.
EACH = 4
ELEMENT = re.compile(r"\[\d+\]")


class Explained(TypedDict):
    """Fields of a ledger's cell that a failing sequence fills."""

    failure: str
    kind: str
    wrong: tuple[str, ...]
    repro: str


@dataclass(frozen=True, kw_only=True)
class TwinEffort:
    """Effort of the search.

    Attributes:
        sequences: of actions for each cell, on one rank.
        over_ranks: further ones over ranks, where there are rules for that; None is a fourth, or as
            many as show every motif in a default run, and no fewer than the rules want.
        seed: of the generator.
        shrunk_by: limit of actions in the sequences that are tried to shrink one failure.
        repros: folder for repro files; None writes none.
    """

    sequences: int = SEQUENCES
    over_ranks: int | None = None
    seed: int = 0
    shrunk_by: int = 1500
    repros: str | None = FOLDER


def usual(rules: Rules, sequences: int = SEQUENCES) -> int:
    """Number of sequences of a class where most classes get that many."""
    return max(1, sequences * rules.each // Rules.each)


def over_ranks(rules: Rules, sequences: int) -> int:
    """Number of sequences over ranks beside so many on one; a default run has every motif."""
    return max(sequences * reaching(rules, SEQUENCES // EACH) // SEQUENCES, rules.least)


def twin_engine(twin: Twin, asked: str | None = None) -> Engine:
    """Engine of a twin; the reference always runs on the CPU."""
    triton = launches_triton(twin.subject) if twin.triton is None else twin.triton
    return engine_among(twin.engines, triton, asked)


def launches_triton(subject: type) -> bool:
    """True if a method of a class can reach a Triton kernel."""
    own = [cls for cls in subject.__mro__ if not cls.__module__.startswith("torch.")]
    methods = [method for cls in own for method in vars(cls).values() if callable(method)]
    return any(uses_triton(inspect.unwrap(method)) for method in methods)


def twin_key(twin: Twin, dtype: str, engine: Engine) -> Key:
    """Names the cell."""
    return Key(
        operation=twin.reference.__name__,
        kernel=twin.name,
        dtype=dtype,
        law=LAW,
        engine=engine.name,
    )


def judge_twin(
    twin: Twin, dtype: str, engine: Engine, effort: TwinEffort, sides: Sides | None = None
) -> Cell:
    """Drive sequences until one fails; the cell, with the shrunk failure if there is one.

    Args:
        twin: the class and its reference.
        dtype: of the parameters.
        engine: where the class runs.
        effort: how hard to look.
        sides: makes the side under judgement; None drives the class in this process.
    """
    key = twin_key(twin, dtype, engine)
    if dtype not in twin.dtypes:
        return Cell(
            key=key, status=Status.NOT_CLAIMED, reason=f"{twin.name} does not claim {dtype}"
        )
    if engine.missing:
        return Cell(key=key, status=Status.SKIPPED, reason=engine.missing)
    started = time.perf_counter()
    calls, count, over, refused = 0, 0, 0, "no sequence was drawn"
    launches = 0

    def ran() -> str:
        return "cpu" * (engine.name == "replay" and count > over and not launches)

    with running(engine), one_thread():
        for where, number in _turns(twin, effort):
            acts = sequence(where.rules, effort.seed, dtype, number)
            ranks = " over ranks" * (where is not twin)
            place = f"seed {effort.seed}, sequence {number}{ranks}"
            driven: list[Driven] = []
            try:
                mismatch = run(where, dtype, str(engine.device), acts, sides, driven)
            except CannotRun as cause:
                reason = f"{cause} [{place}]" if ranks else str(cause)
                return Cell(key=key, status=Status.CANNOT_JUDGE, calls=calls, reason=reason)
            launches += sum(side.launches for side in driven)
            calls += len(acts) if mismatch is None else mismatch.at + 1
            count, over = count + 1, over + (where is not twin)
            if mismatch is not None:
                drawn = f"{place}, {mismatch.at + 1} actions"
                explained = _explained(where, dtype, engine, acts, mismatch, drawn, effort, sides)
                return Cell(
                    key=key,
                    status=Status.FAILED,
                    arithmetic=twin.arithmetic,
                    calls=calls,
                    sequences=count,
                    over_ranks=over,
                    seconds=time.perf_counter() - started,
                    fatal=mismatch.fatal,
                    ran=ran(),
                    **explained,
                )
            if where is twin:
                # Two sides that refuse every construction alike have shown nothing.
                refused = refused and refusal(twin, dtype, acts)
    return Cell(
        key=key,
        status=Status.FAILED if refused else Status.PASSED,
        arithmetic=twin.arithmetic,
        calls=calls,
        sequences=count,
        over_ranks=over,
        seconds=time.perf_counter() - started,
        failure=f"{twin.name}[{dtype}]: no sequence builds the reference: {refused}"
        * bool(refused),
        ran=ran(),
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Give torch one thread, as the class's own process has: sums are formed in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _turns(twin: Twin, effort: TwinEffort) -> Iterator[tuple[Twin, int]]:
    """The pair and the number of each sequence; those over ranks among the others."""
    ranked, over = twin.over_ranks(), 0
    asked = effort.over_ranks
    if asked is None:
        asked = 0 if ranked is None else over_ranks(ranked.rules, effort.sequences)
    for number in range(effort.sequences):
        while ranked is not None and over * effort.sequences < asked * (number + 1):
            yield ranked, over
            over += 1
        yield twin, number


def _explained(
    twin: Twin,
    dtype: str,
    engine: Engine,
    drawn_acts: Sequence[Act],
    drawn_mismatch: Mismatch,
    drawn: str,
    effort: TwinEffort,
    sides: Sides | None,
) -> Explained:
    """Fields of the cell: shrunk, and shown again by the repro file."""

    def failing(candidate: Sequence[Act]) -> Mismatch | None:
        try:
            return run(twin, dtype, str(engine.device), candidate, sides)
        except CannotRun:
            return None

    acts, mismatch = drawn_acts, drawn_mismatch
    if not mismatch.fatal:
        acts, mismatch = shrunk(acts, mismatch, failing, twin.rules, effort.shrunk_by)
    acts = acts[: mismatch.at + 1]
    first = headline(twin, dtype, engine.name, mismatch, acts[-1])
    again = path = ""
    if effort.repros is not None:
        path = write_repro(twin, dtype, acts, mismatch, first, effort.repros)
        again = shown_again(path)
        path = "" if again else path
    return {
        "failure": failure_text(first, twin, dtype, acts, mismatch, drawn, again, path),
        "kind": kind_of(mismatch.difference, acts[-1], twin.rules),
        "wrong": (ELEMENT.sub("[]", mismatch.difference.path),),
        "repro": path,
    }
