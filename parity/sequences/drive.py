"""Drive both sides of a twin with the same actions and compare all that can be seen."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

import torch

from twinstep.parity.records.errors import CannotRun, KernelDied
from twinstep.parity.registry.engines import followed
from twinstep.parity.sequences.actions import Rules
from twinstep.parity.sequences.contracts import Contract, Place
from twinstep.parity.sequences.observe import (
    Difference,
    Observation,
    differences,
    furthest,
    shown,
)
from twinstep.parity.sequences.over_ranks.compare import Found, compared
from twinstep.parity.sequences.over_ranks.drive import WorldRun, carried_out
from twinstep.parity.sequences.over_ranks.laws import broken_law
from twinstep.parity.sequences.over_ranks.place import DrawnRank
from twinstep.parity.sequences.over_ranks.rules import OverRanks
from twinstep.parity.sequences.registry import Twin
from twinstep.parity.sequences.world import Act, OnRank, World, nothing, observe

# What the subject takes over from the reference after an update: path -> bits, by action.
Resets = dict[int, dict[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """The first action after which the two sides differ.

    Attributes:
        at: number of the action.
        difference: the first path that differs.
        want: all that can be seen of the reference then.
        resets: what a bounded subject took over on the way.
        accepted: bounds of the path, where it has any.
        fatal: kind of the end of the class's process; empty if it is still there.
        over: the rank, the groups, and what else is known, of a sequence over ranks.
    """

    at: int
    difference: Difference
    want: Observation
    resets: Resets
    accepted: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    fatal: str = ""
    over: Found | None = None


class Driven(Protocol):
    """A class that is driven, here or in another process."""

    @property
    def outcome(self) -> dict[str, object]:
        """End of the last action, by what it is: `returned`, `raised`."""

    @property
    def says(self) -> str:
        """The last error, with its message."""

    @property
    def built(self) -> bool:
        """True once there is a world."""

    @property
    def launches(self) -> int:
        """Number of launches that ran to their end on replay."""

    def carry_out(self, act: Act) -> None:
        """Carry out one action."""

    def seen(self, twin: Twin) -> Observation:
        """All that can be seen now."""

    def read(self, place: Place) -> torch.Tensor:
        """The tensor at a place, on the CPU."""

    def write(self, place: Place, value: torch.Tensor) -> None:
        """Overwrite the tensor at a place."""


@dataclass
class Side:
    """One class under a rule set, in this process.

    Attributes:
        cls: the optimizer's class.
        rules: what can be done to it.
        dtype: of the parameters.
        device: of the parameters.
        world: what the actions work on, once built.
        outcome: of the last action.
        error: the last one.
        rank: that it is on; None for one that is alone.
        launches: how many have run to their end on replay.
    """

    cls: type
    rules: Rules
    dtype: str
    device: str
    world: World | None = None
    outcome: dict[str, object] = field(default_factory=dict)
    error: Exception | None = None
    rank: OnRank | None = None
    launches: int = 0

    @property
    def says(self) -> str:
        """The last error, with its message."""
        if self.error is None:
            return ""
        notes = "".join(f"; {note}" for note in getattr(self.error, "__notes__", ()))
        return f"{type(self.error).__name__}: {self.error}{notes}"

    @property
    def built(self) -> bool:
        """True once there is a world."""
        return self.world is not None

    def carry_out(self, act: Act) -> None:
        """Carry out one action; an exception is an outcome like any other.

        So is one that ended a launch, whoever caught it.
        """
        self.outcome = {}
        with _unheard(), followed() as fates:
            self._carry_out(act)
        if fates is not None:
            self.launches += fates.completed
            last = self.error if "raised" in self.outcome else None
            for kernel, error in [row for row in fates.raised if row[1] is not last][:1]:
                error.add_note(f"launch of `{kernel}` raised it, and the class went on")
                self.outcome, self.error = {"raised": type(error).__name__}, error

    def _carry_out(self, act: Act) -> None:
        try:
            if self.world is None:
                given: dict[str, Any] = {} if self.rank is None else {"rank": self.rank}
                self.world = self.rules.build(
                    self.cls, self.dtype, self.device, **given, **act.values
                )
                return
            self.outcome["returned"] = self.rules.apply(self.world, act)
        except Exception as error:
            self.outcome = {"raised": type(error).__name__}
            self.error = error

    def seen(self, twin: Twin) -> Observation:
        """All that can be seen now."""
        if self.world is None:
            return observe_nothing(self.outcome)
        return observe(
            self.world,
            outcome=self.outcome,
            properties=twin.properties,
            private=twin.private,
            overlap=twin.flat,
        )

    def read(self, place: Place) -> torch.Tensor:
        """The tensor at a place, on the CPU."""
        return place(cast(World, self.world)).cpu()

    def write(self, place: Place, value: torch.Tensor) -> None:
        """Overwrite the tensor at a place."""
        place(cast(World, self.world)).copy_(value)


class Sides(Protocol):
    """Maker of sides under judgement."""

    def __call__(self, twin: Twin, dtype: str, device: str) -> Driven:
        """A side, begun anew."""

    def over_ranks(self, twin: Twin, dtype: str, device: str, acts: Sequence[Act]) -> WorldRun:
        """The actions carried out on all ranks of a world."""


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Keep what classes tell a training program from standard error; handlers still get it."""
    handler, log = logging.NullHandler(), logging.getLogger("twinstep")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def observe_nothing(outcome: dict[str, object]) -> Observation:
    """Observation where not even the construction went through."""
    from twinstep.parity.sequences.observe import Walk

    walk = Walk(home=torch.device("cpu"))
    walk.root("outcome", outcome)
    return walk.leaves


def refusal(twin: Twin, dtype: str, acts: Sequence[Act]) -> str:
    """The error with which the reference refuses to be built as a sequence wants it, or ""."""
    side = Side(twin.reference, twin.rules, dtype, "cpu")
    side.carry_out(acts[0])
    return side.says


def run(
    twin: Twin,
    dtype: str,
    device: str,
    acts: Sequence[Act],
    sides: Sides | None = None,
    driven: list[Driven] | None = None,
) -> Mismatch | None:
    """Carry out the actions on both sides; the first difference, if any.

    Args:
        twin: the pair.
        dtype: of the parameters.
        device: of the class under judgement; its reference is on the CPU.
        acts: what is done.
        sides: makes the side under judgement; None drives the class in this process.
        driven: gets that side.

    Raises:
        CannotRun: over ranks the reference comes to a stop.
    """
    if "ranks" in acts[0].values:
        return _run_over_ranks(twin, dtype, device, acts, sides)
    want = Side(twin.reference, twin.rules, dtype, "cpu")
    got = sides(twin, dtype, device) if sides else Side(twin.subject, twin.rules, dtype, device)
    if driven is not None:
        driven.append(got)
    resets: Resets = {}
    for at, act in enumerate(acts):
        contracts: list[Contract] = []
        if twin.arithmetic == "bounded" and want.world is not None:
            want.world.updating = partial(_note, contracts, twin.rules, want.world)
        want.carry_out(act)
        try:
            got.carry_out(act)
            if want.world is not None:
                want.world.updating = nothing
            broken = _bounded(contracts, want, got, resets.setdefault(at, {}))
            theirs = got.seen(twin) if broken is None else {}
        except KernelDied as death:
            difference = Difference("its process", str(death), "an action that ends")
            return Mismatch(
                at=at, difference=difference, want=want.seen(twin), resets=resets, fatal=death.kind
            )
        seen = want.seen(twin)
        if broken is not None:
            difference, accepted = broken
            return Mismatch(
                at=at, difference=difference, want=seen, resets=resets, accepted=accepted
            )
        found = differences(theirs, seen)
        if found:
            first = _explained(_telling(found), got, want)
            return Mismatch(at=at, difference=first, want=seen, resets=resets)
        # Observations hold memory, and an action may look whether it is free.
        theirs, seen, found = {}, {}, []
    return None


def on_all_ranks(cls: type, twin: Twin, dtype: str, device: str, acts: Sequence[Act]) -> WorldRun:
    """A class of a twin on all ranks of the world that the first action draws."""
    return sides_over_ranks(cls, twin, dtype, device, acts)[0]


def sides_over_ranks(
    cls: type, twin: Twin, dtype: str, device: str, acts: Sequence[Act]
) -> tuple[WorldRun, dict[int, Side]]:
    """The same, with the side of each rank by number."""
    sides: dict[int, Side] = {}

    def side_on(place: DrawnRank) -> Side:
        sides[place.number] = Side(cls, twin.rules, dtype, device, rank=place)
        return sides[place.number]

    return carried_out(acts, side_on, lambda side: cast(Side, side).seen(twin)), sides


def _run_over_ranks(
    twin: Twin, dtype: str, device: str, acts: Sequence[Act], sides: Sides | None
) -> Mismatch | None:
    want = on_all_ranks(twin.reference, twin, dtype, "cpu", acts)
    stops = [row.broken for rank in want.ranks for row in rank if row.broken]
    if stops or want.stopped:
        reason = (stops or list(want.stopped.values()))[0]
        raise CannotRun(f"the reference comes to a stop over ranks: {reason}")
    if isinstance(twin.rules, OverRanks) and (says := broken_law(acts, want)):
        raise CannotRun(f"the reference breaks a law over ranks: {says}")
    try:
        if sides is not None:
            got = sides.over_ranks(twin, dtype, device, acts)
        else:
            got = on_all_ranks(twin.subject, twin, dtype, device, acts)
    except KernelDied as death:
        difference = Difference("its process", str(death), "actions that end")
        last = len(acts) - 1
        return Mismatch(at=last, difference=difference, want={}, resets={}, fatal=death.kind)
    found = compared(acts, got, want)
    if found is None:
        return None
    return Mismatch(
        at=found.at, difference=found.difference, want=found.want, resets={}, over=found
    )


def _note(contracts: list[Contract], rules: Rules, world: World) -> None:
    """Write down what the update that is about to happen may do."""
    contracts += cast("Sequence[Contract]", rules.contracts(world))


def _telling(found: Sequence[Difference]) -> Difference:
    """Outcomes and state tell more than the weights that follow from them."""
    order = ("outcome", "optimizer", "grads", "params")
    rank = {name: place for place, name in enumerate(order)}
    return furthest(found, lambda row: (rank.get(re.split(r"[.[]", row.path)[0], len(order)),))


def _explained(difference: Difference, got: Driven, want: Driven) -> Difference:
    """With the message, where one side raised."""
    if not difference.path.startswith("outcome"):
        return difference
    texts = [side.says if "raised" in side.outcome else "" for side in (got, want)]
    return Difference(
        difference.path,
        f"{difference.got} ({texts[0]})" if texts[0] else difference.got,
        f"{difference.want} ({texts[1]})" if texts[1] else difference.want,
    )


Ends = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _bounded(
    contracts: Sequence[Contract], want: Side, got: Driven, reset: dict[str, torch.Tensor]
) -> tuple[Difference, Ends | None] | None:
    """Judge an update by its bounds, then give one side the other's bits."""
    if not (want.built and got.built) or got.outcome.keys() != want.outcome.keys():
        return None
    found: list[Difference] = []
    ends: dict[str, Ends | None] = {}
    for contract in contracts:
        for path, allowed in contract.accepted.items():
            try:
                theirs = got.read(contract.places[path]).contiguous()
            except (KeyError, AttributeError, IndexError):
                return None  # the comparison that follows names what is missing
            ours = want.read(contract.places[path])
            if theirs.dtype != ours.dtype or theirs.shape != ours.shape:
                return None
            wrong = (~allowed.accepts(theirs)).reshape(-1)
            if bool(wrong.any()):
                sizes = torch.where(wrong, allowed.errors(theirs).clamp_min(1e-300), -1.0)
                place = int(sizes.argmax())
                one, other = (shown(x.reshape(-1)[place]) for x in (theirs, allowed.value))
                count = f"{int(wrong.sum())} of {wrong.numel()} in {path}" * (wrong.numel() > 1)
                where = f"{path}[{place}]"
                found.append(Difference(where, one, other, float(sizes[place]), count))
                ends[where] = _ends(allowed)
                continue
            if contract.follows:
                want.write(contract.places[path], theirs)
                continue
            reset[path] = ours.detach().clone()
            got.write(contract.places[path], ours)
    if not found:
        return None
    worst = furthest(found, lambda row: ())
    return worst, ends[worst.path]


def _ends(allowed: object) -> Ends | None:
    low, high = getattr(allowed, "low", None), getattr(allowed, "high", None)
    zone = getattr(allowed, "zone", None)
    if low is None or high is None or zone is None:
        return None
    return low, high, zone
