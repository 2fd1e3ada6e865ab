"""Probability that a sequence of actions notices a wrong optimizer class, measured."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from twinstep.parity.proof.corpus.optimizers import Optimizer, twin_of
from twinstep.parity.sequences.drive import run, sequence
from twinstep.parity.sequences.judge import EACH, SEQUENCES

WANTED = 0.99


@dataclass(frozen=True)
class Power:
    """Outcome of driving a wrong class through sequences of several seeds.

    Attributes:
        row: the class.
        dtype: of the parameters.
        noticed: sequences that showed a difference.
        sequences: all of them.
    """

    row: Optimizer
    dtype: str
    noticed: int
    sequences: int

    @property
    def each(self) -> float:
        """Probability that one sequence notices it."""
        return self.noticed / self.sequences

    @property
    def run(self) -> float:
        """Probability that the sequences of a default run notice it.

        As if all were alike; motifs take turns, which makes a miss rarer still.
        """
        count = SEQUENCES // EACH if self.row.over_ranks else SEQUENCES
        return 1.0 - (1.0 - self.each) ** count

    @property
    def enough(self) -> bool:
        """True if a default run notices it with the probability that is wanted."""
        return self.run >= WANTED


def power_of(row: Optimizer, dtype: str, enough: int, most: int) -> Power:
    """Drive a class through sequences of three seeds in turn.

    Args:
        row: the class.
        dtype: of the parameters.
        enough: notices after which the measurement ends.
        most: limit of sequences.
    """
    twin, noticed = twin_of(row), 0
    if row.over_ranks:
        twin = twin.over_ranks() or twin
    for number in count():
        if noticed == enough or number == most:
            return Power(row, dtype, noticed, number)
        acts = sequence(twin.rules, 11 + number % 3, dtype, number // 3)
        noticed += run(twin, dtype, "cpu", acts) is not None
    raise AssertionError
