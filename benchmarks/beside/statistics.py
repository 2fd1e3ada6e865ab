"""Ratios of times, and how far they can be trusted.

Two things take turns within a process; the median of the ratios of neighbouring turns is the
process's answer. Answers of fresh processes are what differs from run to run (where memory lies,
which core a thread gets), so the interval is Student's over the processes, on logarithms.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Student's t, one tail: confidence -> quantiles for 1, 2, ... degrees of freedom.
STUDENT = {
    0.975: (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201),
    0.995: (63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106),
}


@dataclass(frozen=True)
class Ratio:
    """A ratio of times with its interval.

    Attributes:
        low, middle, high: the interval's ends and the estimate.
        processes: that answered.
    """

    low: float
    middle: float
    high: float
    processes: int

    def above(self, effect: float) -> bool:
        """True if the whole interval lies above 1 + effect."""
        return self.low > 1.0 + effect

    def __str__(self) -> str:
        """The estimate and the interval: 1.25 (1.20 to 1.31)."""
        return f"{self.middle:.2f} ({self.low:.2f} to {self.high:.2f})"


def of_process(times: Sequence[float], base: Sequence[float]) -> float:
    """Median of the ratios of neighbouring turns; of the first, where one has fewer.

    >>> of_process([2.0, 2.0, 9.0], [1.0, 1.0, 1.0])
    2.0
    """
    return statistics.median(a / b for a, b in zip(times, base, strict=False))


def over_processes(answers: Sequence[float], confidence: float = 0.975) -> Ratio:
    """The ratio and its interval from one answer of each process; one process has no interval.

    Args:
        answers: ratios.
        confidence: 0.975 makes a two-sided interval of 95 %, 0.995 one of 99 %.
    """
    logs = [math.log(answer) for answer in answers]
    middle, count = statistics.fmean(logs), len(logs)
    if count == 1:
        return Ratio(0.0, math.exp(middle), math.inf, 1)
    table = STUDENT[confidence]
    quantile = table[min(count - 1, len(table)) - 1]
    reach = quantile * statistics.stdev(logs) / math.sqrt(count)
    return Ratio(math.exp(middle - reach), math.exp(middle), math.exp(middle + reach), count)


def rate_at_most(alarms: int, tests: int, confidence: float = 0.95) -> float:
    """Upper limit of a rate of false alarms, given so many in so many tests (Clopper-Pearson).

    >>> round(rate_at_most(0, 59), 3), rate_at_most(0, 0)
    (0.05, 1.0)
    """
    if alarms >= tests:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        below = sum(
            math.comb(tests, k) * rate**k * (1.0 - rate) ** (tests - k) for k in range(alarms + 1)
        )
        low, high = (rate, high) if below > 1.0 - confidence else (low, rate)
    return high
