"""`parity model-check`: the loss scalers explored, and what was found printed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from twinstep.golden.trace import write
from twinstep.parity.proof.model_check.check import (
    SCALER,
    Checked,
    Difference,
    check,
    known,
    silent,
)
from twinstep.parity.proof.model_check.configurations import configurations
from twinstep.parity.proof.model_check.contrasts import (
    contrasts,
    trace_of_rule,
    write_witnesses,
)
from twinstep.parity.proof.model_check.explore import Configuration
from twinstep.parity.proof.peers.installed import is_installed
from twinstep.parity.records.errors import EXIT_BROKEN, EXIT_KEPT, UsageError


def model_check(
    depth: int,
    sample: int,
    write_them: bool,
    out: Path | None,
    chosen: Sequence[Configuration] | None = None,
) -> int:
    """Explore, print, and write witnesses; the exit code.

    Args:
        depth: steps from a first state.
        sample: every so many-th configuration alone; 1 takes all.
        write_them: the witnesses of contrasts go to golden/witnesses.
        out: a folder for witnesses of differences from other classes.
        chosen: configurations instead of all.
    """
    if depth < 1 or sample < 1:
        raise UsageError("--depth and --sample should be at least 1")
    every = configurations() if chosen is None else list(chosen)
    found = check(every[::sample], depth, _progress())
    print("\n".join(report(found)))
    apart = contrasts(depth)
    wrong = [c.name for c, letters, _ in apart if bool(letters) != bool(c.says)]
    for contrast, letters, pairs in apart:
        what = f"shortest witness {letters}: {contrast.says}" if letters else "equal"
        print(f"{contrast.name}: {what} ({pairs} pairs of states)")
    if write_them:
        print("\n".join(map(str, write_witnesses(apart))))
    if out is not None and found.differences:
        out.mkdir(parents=True, exist_ok=True)
        for number, difference in enumerate(found.differences):
            trace = trace_of_rule(
                f"difference_{number}",
                difference.configuration.rule,
                difference.start,
                difference.letters,
                f"{difference.who}: {difference.says}",
            )
            print(write(trace, out))
    if wrong:
        print(f"not as stated: {', '.join(wrong)}")
    return EXIT_BROKEN if wrong or found.invariants or found.unexplained() else EXIT_KEPT


def report(found: Checked) -> list[str]:
    """Numbers, broken invariants, and differences with their shortest sequences."""
    said = [
        f"{found.configurations} configurations, {found.states} states to depth {found.depth}, "
        f"{found.steps} transitions, {found.seconds:.0f} s"
    ]
    said += [f"{who}: {count} transitions compared" for who, count in found.compared.items()]
    if SCALER not in found.compared and not is_installed("deepspeed"):
        said.append("deepspeed is not installed: its three classes are left out")
    said += [f"broken: {sentence}" for sentence in found.invariants]
    said += list(map(_sentence, found.unexplained()))
    explained: dict[tuple[str, str], list[Difference]] = {}
    for one in found.differences:
        if reason := known(one):
            explained.setdefault((one.who, reason), []).append(one)
    for (who, reason), rows in explained.items():
        shortest = min(rows, key=lambda row: len(row.letters))
        said.append(
            f"{who} differs in {sum(row.count for row in rows)} transitions, as is known: {reason} "
            f"(shortest: from {shortest.start.scale}, {shortest.letters})"
        )
    said.append(
        f"{len(found.invariants)} invariants broken, {len(found.unexplained())} unknown differences"
    )
    return said


def _sentence(one: Difference) -> str:
    return (
        f"{one.who} differs in {one.count} transitions of {one.configuration.name}; shortest: from "
        f"{one.start.scale}, {one.letters}: {one.says}"
    )


def _progress() -> Callable[[str], None]:
    if not sys.stderr.isatty():
        return silent

    def told(words: str) -> None:
        print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)

    return told
