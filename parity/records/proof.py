"""The words of a proof, and its rows: one kernel in one situation.

Every command, table and report takes its words from here; docs/guide/proof.md explains them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

PROVED, REFUTED, NOT_PROVED = "proved", "refuted", "not proved"
UNSUPPORTED, OUT_OF_TIME = "unsupported", "out of time"
WORDS: Mapping[str, str] = {
    PROVED: "every written element has the reference's expression on every path",
    REFUTED: "a run with the values of the witness gives other results: the one failure",
    NOT_PROVED: "expressions differ, or a branch was not followed; the kernel may be right",
    UNSUPPORTED: "a name reached what is not followed",
    OUT_OF_TIME: "the paths were not all followed in the time given",
}
"""What each word says."""
WORST = (REFUTED, NOT_PROVED, UNSUPPORTED, OUT_OF_TIME, PROVED)
"""The words in the order in which one decides for many."""


@dataclass(frozen=True)
class Verdict:
    """The word for one situation.

    Attributes:
        word: one of `WORDS`.
        detail: the witness, the first difference, the opcode: what the word needs.
        elements: written elements that were compared, over all paths.
        paths: that were followed.
        assumes: what the proof holds under.
        seconds: that it took.
    """

    word: str
    detail: str = ""
    elements: int = 0
    paths: int = 0
    assumes: tuple[str, ...] = ()
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


def held_for(proofs: Sequence[Proof]) -> list[str]:
    """Sizes, layouts and assumptions of what is proved, one line for each set of assumptions."""
    by_place: dict[str, list[Proof]] = {}
    for proof in proofs:
        by_place.setdefault(proof.place, []).append(proof)
    found: dict[tuple[str, ...], dict[str, None]] = {}
    for place, own in by_place.items():
        whole = word_of(own) == PROVED
        for proof in own:
            if proof.verdict.word == PROVED:
                choices = f" with {len(own)} choices of options" if len(own) > 1 else ""
                words = place + choices if whole else proof.words
                found.setdefault(proof.verdict.assumes, {})[words or "scalars"] = None
    return [
        f"proved for {', '.join(words)}" + (f"; {'; '.join(assumes)}" if assumes else "")
        for assumes, words in found.items()
    ]
