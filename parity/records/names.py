"""Names that flags take: the engines, and the sentence for a name that is unknown."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches

from twinstep.parity.records.errors import UsageError

ENGINES = ("cuda", "replay", "cpu", "interpret")
LISTED = 20


def unknown(what: str, value: str, known: Collection[str], listed_by: str = "") -> UsageError:
    """Error about a name that is not known, with the known ones and the nearest of them.

    Args:
        what: takes the name: a flag, for instance.
        value: the name.
        known: the names that it takes.
        listed_by: a command that lists them, named instead where they are many.
    """
    many = listed_by and len(known) > LISTED
    names = f"one of those that {listed_by} lists" if many else f"among {', '.join(sorted(known))}"
    within = sorted((name for name in known if value in name), key=len)
    near = get_close_matches(value, sorted(known), 1) or within
    hint = f"; did you mean {near[0]}?" if value and near else ""
    return UsageError(f'{what} "{value}" is unknown, but should be {names}{hint}')


def number(count: int, noun: str) -> str:
    """Count and noun, with an s unless there is one."""
    return f"{count} {noun}" + "s" * (count != 1)


def check_among(what: str, given: Sequence[str], known: Sequence[str], where: str) -> None:
    """Refuse names that a registration gives and that are not known.

    Raises:
        UsageError: with the known ones.
    """
    for value in given:
        if value not in known:
            raise UsageError(
                f'{what} has "{value}", but should be among {", ".join(known)} [{where}]'
            )
