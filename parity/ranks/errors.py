"""Errors of simulated ranks: those that one rank raises, and the one that a run raises for all."""

from __future__ import annotations

from collections.abc import Mapping


class CollectiveError(RuntimeError):
    """A collective that cannot take place.

    Attributes:
        rank: that raises, by its number in the world.
        group: its name and ranks; empty if the error is about none.
        collective: as this rank called it; the same.
    """

    def __init__(self, says: str, *, rank: int, group: str = "", collective: str = "") -> None:
        facts = [f"rank {rank}", *filter(None, (group, collective))]
        super().__init__(f"{says} [{', '.join(facts)}]")
        self.rank, self.group, self.collective = rank, group, collective


class MismatchedCalls(CollectiveError):
    """Ranks of a group that meet with different calls."""


class RankLost(CollectiveError):
    """A rank that others wait for, and that has ended, is stalled, or waits for them."""


class BufferTouched(CollectiveError):
    """A buffer that was written between the call of a collective and its completion."""


class Refused(CollectiveError):
    """A call that no simulated group carries out, or that real ones misunderstand."""


class RanksFailed(RuntimeError):
    """Ranks of a run that raised.

    Attributes:
        errors: by rank.
        results: of the ranks that returned, by rank.
    """

    def __init__(self, errors: Mapping[int, BaseException], results: Mapping[int, object]) -> None:
        lines = [f"rank {rank}: {type(e).__name__}: {e}" for rank, e in sorted(errors.items())]
        super().__init__(
            "\n".join([f"{len(errors)} of {len(errors) + len(results)} ranks:", *lines])
        )
        self.errors, self.results = dict(errors), dict(results)

    def first(self) -> BaseException:
        """The first error that is not about another rank; the first of all if there is none."""
        of_its_own = [e for e in self.errors.values() if not isinstance(e, RankLost)]
        return (of_its_own or list(self.errors.values()))[0]
