"""The words of a proof, and its rows: one kernel in one situation.

Every command, table and report takes its words from here; docs/guide/proof.md explains them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

PROVED, REFUTED, NOT_PROVED = "proved", "refuted", "not proved"
UNSUPPORTED, OUT_OF_TIME, ENDED = "unsupported", "out of time", "ended"
WORDS: Mapping[str, str] = {
    PROVED: "every written element has the reference's expression on every path",
    REFUTED: "a run with the values of the witness gives other results: the one failure",
    NOT_PROVED: "expressions differ, or a branch was not followed; the kernel may be right",
    UNSUPPORTED: "a name reached what is not followed",
    OUT_OF_TIME: "the paths were not all followed in the time given",
    ENDED: "the call ended its process",
}
"""What each word says."""
WORST = (REFUTED, ENDED, NOT_PROVED, UNSUPPORTED, OUT_OF_TIME, PROVED)
"""The words in the order in which one decides for many."""
LISTED = 8
"""Most values of a counter that are printed one by one."""


@dataclass(frozen=True)
class Verdict:
    """The word for one situation.

    Attributes:
        word: one of `WORDS`.
        detail: the witness, the first difference, the opcode: what the word needs.
        elements: written elements that were compared, over all paths.
        paths: that were followed.
        assumes: what the proof holds under.
        kept: steps and counters, which are no names, and their values: it holds for these.
        seconds: that it took.
    """

    word: str
    detail: str = ""
    elements: int = 0
    paths: int = 0
    assumes: tuple[str, ...] = ()
    kept: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.word not in WORDS:
            raise ValueError(f"{self.word} is none of {', '.join(WORDS)} [proof]")


@dataclass(frozen=True, kw_only=True)
class Proof:
    """A kernel in one situation, and the verdict.

    Attributes:
        kernel: its name.
        operation: that it implements.
        dtype: combination.
        place: layout, sizes and alignment in words; empty where there are no lists.
        words: the place and the options in words.
        facts: the same as data.
        verdict: of the prover.
    """

    kernel: str
    operation: str
    dtype: str
    place: str = ""
    words: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)
    verdict: Verdict

    def record(self) -> dict[str, object]:
        """The proof as plain data."""
        names = {"kernel": self.kernel, "operation": self.operation, "dtype": self.dtype}
        return {**names, **self.facts, **asdict(self.verdict)}


def word_of(proofs: Iterable[Proof]) -> str:
    """The worst word of some proofs; empty without any."""
    words = {proof.verdict.word for proof in proofs}
    return next((word for word in WORST if word in words), "")


def counted(proofs: Iterable[Proof], order: Sequence[str] = tuple(WORDS)) -> str:
    """Counts of proofs by word, in words."""
    counts = Counter(proof.verdict.word for proof in proofs)
    return ", ".join(f"{counts[word]} {word}" for word in order if counts[word])


def by_row(proofs: Iterable[Proof]) -> dict[tuple[str, str], list[Proof]]:
    """Proofs of each kernel on each dtype combination."""
    rows: dict[tuple[str, str], list[Proof]] = {}
    for proof in proofs:
        rows.setdefault((proof.kernel, proof.dtype), []).append(proof)
    return rows


def conditions(verdicts: Sequence[Verdict]) -> list[str]:
    """Values of counters that proofs hold for, and what they assume, in words."""
    kept: dict[str, set[int]] = {}
    for verdict in verdicts:
        for name, values in verdict.kept.items():
            kept.setdefault(name, set()).update(values)
    words = [f"{name} = {listed(values)}" for name, values in kept.items()]
    return [*words, *dict.fromkeys(line for v in verdicts for line in v.assumes)]


def listed(values: Iterable[int]) -> str:
    """Numbers one by one; of many their count and the ends."""
    order = sorted(values)
    if len(order) <= LISTED:
        return ", ".join(map(str, order))
    return f"{len(order)} values from {order[0]} to {order[-1]}"


def held_for(proofs: Sequence[Proof]) -> list[str]:
    """Sizes, layouts and conditions of what is proved, one line for each set of conditions."""
    by_place: dict[str, list[Proof]] = {}
    for proof in proofs:
        by_place.setdefault(proof.place, []).append(proof)
    found: dict[tuple[str, ...], dict[str, None]] = {}
    for place, own in by_place.items():
        choices = f" with {len(own)} choices of options" if len(own) > 1 else ""
        whole = {place + choices: own} if word_of(own) == PROVED else {p.words: [p] for p in own}
        for words, some in whole.items():
            if word_of(some) == PROVED:
                under = tuple(conditions([proof.verdict for proof in some]))
                found.setdefault(under, {})[words or "scalars"] = None
    return [
        f"proved for {', '.join(words)}" + (f"; {'; '.join(under)}" if under else "")
        for under, words in found.items()
    ]
