"""Probability that a sequence of actions notices a wrong optimizer class, measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from math import log

from twinstep.parity.proof.corpus.optimizers import Optimizer, twin_of
from twinstep.parity.runner.calls.process_state import put_back
from twinstep.parity.sequences.drawing import EVERY, kind_of, sequence
from twinstep.parity.sequences.drive import run
from twinstep.parity.sequences.judge import SEQUENCES, over_ranks, usual

WANTED = 0.99
# A class whose power is at least SURE, with a risk of DOUBT to err, is measured no longer.
SURE, DOUBT = 0.999, 1e-3
Kind = str | int


@dataclass(frozen=True)
class Power:
    """Outcome of driving a wrong class through sequences of several seeds.

    Attributes:
        row: the class.
        dtype: of the parameters.
        default: sequences of each kind in a default run.
        kinds: sequences that showed a difference, and all of them, for each kind of sequence.
    """

    row: Optimizer
    dtype: str
    default: Mapping[Kind, int]
    kinds: Mapping[Kind, tuple[int, int]]

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
        return self.noticed / max(self.sequences, 1)

    @property
    def run(self) -> float:
        """Probability that the sequences of a default run notice it.

        A run has as many of each kind as it always has, so kinds are counted apart. One sequence
        more of each, as likely as all to notice, keeps few from being taken for certainty.
        """
        missed = 1.0
        for kind, number in self.default.items():
            noticed, driven = self.kinds.get(kind, (0, 0))
            missed *= (1.0 - (noticed + self.each) / (driven + 1)) ** number
        return 1.0 - missed

    @property
    def enough(self) -> bool:
        """True if a default run notices it with the probability that is wanted."""
        return self.run >= WANTED

    @property
    def sure(self) -> bool:
        """True if these notices would be a surprise, were the power of a default run below SURE.

        Chernoff's bound. Kinds are taken together, which makes the power look smaller where they
        are drawn about as often as in a run. It is asked after every sequence, so that the risk
        is some times DOUBT.
        """
        least = 1.0 - (1.0 - SURE) ** (1.0 / sum(self.default.values()))
        if self.each <= least:
            return False
        surprise = self.each * log(self.each / least)
        if self.each < 1.0:
            surprise += (1.0 - self.each) * log((1.0 - self.each) / (1.0 - least))
        return self.sequences * surprise >= -log(DOUBT)


def power_of(row: Optimizer, dtype: str, enough: int, most: int) -> Power:
    """Drive a class through sequences of three seeds in turn.

    A motif comes twice in a default run, and seldom here: where `most` sequences leave it open,
    those of the kind that notices most follow alone.

    Args:
        row: the class.
        dtype: of the parameters.
        enough: notices after which the measurement ends, if it is not `sure` before; twice as many
            where these are too few.
        most: limit of sequences of all kinds.
    """
    twin, kinds = twin_of(row), dict[Kind, tuple[int, int]]()
    if row.over_ranks:
        twin = twin.over_ranks() or twin
    rules = twin.rules
    own = over_ranks(rules, SEQUENCES) if row.over_ranks else usual(rules)
    default = Counter(kind_of(rules, 0, dtype, n) for n in range(own))

    def drive(number: int, alone: Kind | None = None) -> None:
        # From there on all kinds come soon.
        seed, at = 11 + number % 3, EVERY - 8 + number // 3
        kind = kind_of(rules, seed, dtype, at)
        if alone in (None, kind):
            with put_back():
                found = run(twin, dtype, "cpu", sequence(rules, seed, dtype, at)) is not None
            noticed, driven = kinds.get(kind, (0, 0))
            kinds[kind] = noticed + found, driven + 1

    # Looked at twice, and not until it has become enough: that would favour this outcome.
    aim = enough
    for number in range(most):
        power = Power(row, dtype, default, kinds)
        if power.sure and power.enough:
            break
        if power.noticed >= aim:
            if power.enough or aim > enough:
                break
            aim = 2 * enough
        drive(number)
    else:
        best = max(kinds, key=lambda kind: kinds[kind][0] / kinds[kind][1])
        numbers = count(most)
        while kinds[best][0] and kinds[best][1] < 2 * enough:
            drive(next(numbers), best)
    return power
