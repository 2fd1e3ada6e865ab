"""Proofs on the screen: how many rows are proved and for what, and why others are not."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set

from rich.console import Console

from twinstep.parity.records.names import number
from twinstep.parity.records.proof import (
    ENDED,
    OUT_OF_TIME,
    PROVED,
    REFUTED,
    UNSUPPORTED,
    WORST,
    Proof,
    by_row,
    word_of,
)
from twinstep.parity.report.words import print_hanging

REASONS = 6
ELEMENT = re.compile(r"\w+\[\d+\](\[\d+\])?")
INSTRUCTION = re.compile(r"`(?:@\S+ )?([a-z][\w.:]*) [^`]*`")


Rows = Set[tuple[str, str]]


def print_proofs(
    console: Console, proofs: Sequence[Proof], verbose: bool = False, rejected: Rows = frozenset()
) -> None:
    """Print counts, what the proofs hold for, and the reason of every row that is not proved.

    A proof is of one call's values: a row that breaks a law counts as no proved one.

    Args:
        console: to print on.
        proofs: of the run.
        verbose: name every row and its reason.
        rejected: rows, a kernel on a dtype combination each, that have broken a law.
    """
    rows = {
        name: row
        for name, row in by_row(proofs).items()
        if name not in rejected or word_of(row) == REFUTED
    }
    if not rows:
        if proofs:
            print_hanging(console, "proofs: ", ["not", "counted,", "each", "row", "broke a law"])
        return
    ends = {name: word_of(row) for name, row in rows.items()}
    count = sum(word == PROVED for word in ends.values())
    held = [proof for name, row in rows.items() if ends[name] == PROVED for proof in row]
    places = dict.fromkeys(proof.place for proof in held if proof.place)
    sizes = f" ({', '.join(places)})" if places else ""
    head = "proofs: "
    whose = " that broke no law are" if rejected else ""
    said = (
        f"{count} of {len(rows.keys() - rejected)} rows{whose} proved for every value that "
        "tensors and controls may have, in one call"
    )
    print_hanging(console, head, f"{said}{sizes}; parity prove tries more sizes".split())
    for assumed, where in assumptions(rows).items():
        print_hanging(console, f"assumed in {len(where):>3} rows  ", assumed.split())
    reasons: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, row in rows.items():
        if ends[name] != PROVED:
            worst = next(proof for proof in row if proof.verdict.word == ends[name])
            reasons.setdefault((ends[name], reason(worst)), []).append(name)
    order = sorted(reasons.items(), key=lambda item: (WORST.index(item[0][0]), -len(item[1])))
    shown = order if verbose else [*order[:REASONS]]
    for (word, why), names in shown:
        kernels = dict.fromkeys(kernel for kernel, _ in names)
        listed = [f"{kernel}," for kernel in kernels]
        if verbose:
            listed = [f"{kernel} {dtype}," for kernel, dtype in names]
        listed[-1] = listed[-1].removesuffix(",") + ":"
        style = "bold red" if word == REFUTED else ""
        print_hanging(console, f"{word} {len(names):>3}  ", [*listed, *why.split()], style)
    rest = sum(len(names) for _, names in order[len(shown) :])
    if rest:
        print_hanging(console, f"and {number(rest, 'row')} for other reasons: ", ["see", "-v"])
    console.print()


def assumptions(rows: Mapping[tuple[str, str], Sequence[Proof]]) -> dict[str, set[str]]:
    """Assumptions of proved rows, and the rows that have them."""
    found: dict[str, set[str]] = {}
    for name, row in rows.items():
        for proof in row if word_of(row) == PROVED else ():
            for assumed in proof.verdict.assumes:
                found.setdefault(assumed, set()).add(" ".join(name))
    return found


def reason(proof: Proof) -> str:
    """Reason why a row is not proved: one line, without what differs between elements."""
    lines = proof.verdict.detail.splitlines() or [""]
    if proof.verdict.word == REFUTED:
        return f"[{proof.dtype}] {proof.words}: {lines[0]}".replace("  ", " ")
    if proof.verdict.word in (UNSUPPORTED, OUT_OF_TIME, ENDED):
        return ELEMENT.sub("memory", INSTRUCTION.sub(r"`\1`", lines[0]))
    return ELEMENT.sub("an output", lines[0]) + "".join(f"; {line}" for line in lines[1:3])


def column(proofs: Sequence[Proof], rejected: Rows = frozenset()) -> str:
    """The column of the table: proved rows of a kernel that broke no law, of all its rows."""
    rows = by_row(proofs)
    if not rows:
        return ""
    refuted = sum(word_of(row) == REFUTED for row in rows.values())
    if refuted:
        return f"{refuted} REFUTED"
    proved = [name for name, row in rows.items() if word_of(row) == PROVED]
    return f"{len(set(proved) - rejected)}/{len(rows)}"
