"""Probability that a sequence of actions notices a wrong optimizer class, measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count

from twinstep.parity.proof.corpus.optimizers import Optimizer, twin_of
from twinstep.parity.sequences.drive import EVERY, EXTENDED, run, sequence
from twinstep.parity.sequences.judge import EACH, SEQUENCES

WANTED, USUAL = 0.99, "usual"


@dataclass(frozen=True)
class Power:
    """Outcome of driving a wrong class through sequences of several seeds.

    Attributes:
        row: the class.
        dtype: of the parameters.
        kinds: sequences that showed a difference, and all of them, for each kind of sequence.
    """

    row: Optimizer
    dtype: str
    kinds: Mapping[str, tuple[int, int]]

    @property
    def noticed(self) -> int:
        """Sequences that showed a difference."""
        return sum(noticed for noticed, _ in self.kinds.values())

    @property
    def sequences(self) -> int:
        """All sequences."""
        return sum(driven for _, driven in self.kinds.values())

    @property
    def each(self) -> float:
        """Probability that one sequence notices it."""
        return self.noticed / self.sequences

    @property
    def run(self) -> float:
        """Probability that the sequences of a default run notice it.

        As if all of a kind were alike; motifs take turns, which makes a miss rarer still.
        """
        kinds = Counter(kind_of(n) for n in range(SEQUENCES))
        if self.row.over_ranks:
            kinds = Counter({USUAL: SEQUENCES // EACH})
        rates = {kind: noticed / driven for kind, (noticed, driven) in self.kinds.items()}
        return 1.0 - math.prod((1.0 - rates[kind]) ** kinds[kind] for kind in rates)

    @property
    def enough(self) -> bool:
        """True if a default run notices it with the probability that is wanted."""
        return self.run >= WANTED


def kind_of(number: int) -> str:
    """Kind of the sequence of a number: those of a kind are drawn in one way."""
    place = number % EVERY
    return "long" if place == EVERY - 1 else str(EXTENDED.get(place, USUAL))


def power_of(row: Optimizer, dtype: str, enough: int, most: int) -> Power:
    """Drive a class through sequences of three seeds in turn.

    Args:
        row: the class.
        dtype: of the parameters.
        enough: notices after which the measurement ends.
        most: limit of sequences.
    """
    twin, kinds = twin_of(row), dict[str, tuple[int, int]]()
    if row.over_ranks:
        twin = twin.over_ranks() or twin
    for number in count():
        power = Power(row, dtype, kinds)
        if power.noticed == enough or number == most:
            return power
        # From there on all kinds come soon.
        at = EVERY - 8 + number // 3
        acts = sequence(twin.rules, 11 + number % 3, dtype, at)
        found = run(twin, dtype, "cpu", acts) is not None
        kind = USUAL if row.over_ranks else kind_of(at)
        noticed, driven = kinds.get(kind, (0, 0))
        kinds[kind] = noticed + found, driven + 1
    raise AssertionError
