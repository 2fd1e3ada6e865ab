"""Bitwuzla asked about two expressions: values that tell them apart, or a proof that none do.

What it proves holds for every value of every leaf under the conditions of a path. What it says to
be a difference is a suggestion: it counts once replay has run the values.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

from twinstep.parity.prove.terms import FORMATS, Terms
from twinstep.replay.names.evaluate import needed
from twinstep.replay.names.table import Table

SECONDS = 10.0
"""Limit of one question, in seconds of work."""
LARGE = 1500
"""Most expressions in one question."""
EQUAL, DIFFERENT, NO_ANSWER = "equal", "different", "no answer"
MISSING = "bitwuzla was not asked: pip install 'twinstep[prove]' adds it"


@dataclass(frozen=True)
class Answer:
    """Result of a question.

    Attributes:
        word: `equal`, `different` or `no answer`.
        bits: of leaves with which the two differ, by their numbers.
    """

    word: str
    bits: dict[int, int] = field(default_factory=dict)


def installed() -> bool:
    """True if bitwuzla can be asked."""
    return find_spec("bitwuzla") is not None


def ask(
    table: Table,
    a: int,
    b: int,
    kind: str,
    path: Sequence[tuple[int, bool]] = (),
    seconds: float = SECONDS,
) -> Answer:
    """Ask whether two expressions can differ on a path.

    Args:
        table: that holds them.
        a: number of the first.
        b: number of the second.
        kind: `f16`, `bf16`, `f32`, `f64`: all NaN are one value; anything else has none.
        path: outcomes of conditions, assumed.
        seconds: of this process's work, after which there is no answer.
    """
    import bitwuzla

    if len(needed(table, [a, b, *(n for n, _ in path)])) > LARGE:
        return Answer(NO_ANSWER)
    terms = Terms(table)
    if kind in FORMATS and table.rows[a].granules * 16 == sum(FORMATS[kind]):
        pair = [terms.number(n, kind) for n in (a, b)]
    else:
        pair = [terms.bits(n) for n in (a, b)]
    facts = [terms.bits(n) if o else terms.term("NOT", terms.bits(n)) for n, o in path]
    options = bitwuzla.Options()
    options.set(bitwuzla.Option.PRODUCE_MODELS, True)
    machine = bitwuzla.Bitwuzla(terms.manager, options)
    # Its own limit is by the clock, so that a busy machine would have other answers.
    deadline = time.process_time() + seconds
    machine.configure_terminator(lambda: time.process_time() > deadline)
    for fact in (*facts, *terms.side, terms.term("DISTINCT", *pair)):
        machine.assert_formula(fact)
    result = machine.check_sat()
    if result == bitwuzla.Result.UNSAT:
        return Answer(EQUAL)
    if result != bitwuzla.Result.SAT:
        return Answer(NO_ANSWER)
    values = {n: int(str(machine.get_value(t).value(2)), 2) for n, t in terms.leaves.items()}
    return Answer(DIFFERENT, values)


def shape(table: Table, numbers: Iterable[int]) -> tuple[object, ...]:
    """Expressions with their leaves numbered in order: equal shapes differ in leaves alone."""
    wanted = list(numbers)
    place: dict[int, int] = {}
    leaves: dict[int, int] = {}
    rows: list[object] = []
    for at, number in enumerate(_in_order(table, wanted)):
        row = table.rows[number]
        if row.op == "leaf":
            own: tuple[object, ...] = (leaves.setdefault(number, len(leaves)),)
        elif row.op == "const":
            own = row.args
        else:
            own = tuple(place[n] for n in row.args)
        place[number] = at
        rows.append((row.op, row.granules, own))
    return (*rows, *(place[n] for n in wanted))


def _in_order(table: Table, numbers: Sequence[int]) -> list[int]:
    """Expressions and their parts, as a walk from the first one meets them; parts first."""
    found: dict[int, None] = {}
    stack = [(n, False) for n in reversed(numbers)]
    while stack:
        number, ready = stack.pop()
        if number in found:
            continue
        row = table.rows[number]
        if ready or row.op in ("leaf", "const"):
            found[number] = None
        else:
            stack.append((number, True))
            stack += [(n, False) for n in reversed(row.args)]
    return list(found)
