"""Draw the sequences of a run so that much of what can meet in them does meet.

Two actions drawn alone rarely come one soon after the other: a run has about as many steps as
there are pairs of actions. So each action is the one, among some that are drawn, that brings
together most of what has not been together: it with those shortly before it, with what they were
given, and with how the optimizer was built; and values of arguments of one action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from random import Random

from twinstep.parity.sequences.actions import Action, Motif, Rules, fixed_step
from twinstep.parity.sequences.world import Act, Value

# One sequence in EVERY is long, and some have many parameters, a large one, or many groups.
EVERY = 50
EXTENDED: Mapping[int, Mapping[str, Value]] = {
    12: {"extent": "crowd"},
    25: {"extent": "crowd of 330"},
    37: {"extent": "crowd of 256"},
    **dict.fromkeys((6, 31), {"extent": "large"}),
    **dict.fromkeys((18, 43), {"groups": 20}),
}
LONG, USUAL = "long", "usual"
# Sequences after which all is taken for not yet shown: about a default run.
AGAIN = 3 * EVERY
# Actions before one that it meets, and candidates for each.
NEAR, CANDIDATES = 3, 8
# Every third action is one of those that come often: what came before shows in a step.
OFTEN = 3
# Choices of an argument that is covered; those with more are seeds, or weighted lists.
LISTED = 50
# An action, or one of its arguments and the place of its value among the choices.
Thing = tuple[str, ...] | tuple[str, str, int]
Pair = tuple[Thing, Thing]


def sequence(rules: Rules, seed: int, dtype: str, number: int) -> list[Act]:
    """The actions of a sequence; the same in every run.

    Three of four have a motif, in turn; another begins with each seed and dtype. Some are long, and
    some have many parameters, a large one, or many groups.
    """
    return list(_drawn(rules, seed, dtype)[number])


def kind_of(rules: Rules, seed: int, dtype: str, number: int) -> str | int:
    """Kind of a sequence, all of which are drawn in one way: the place of its motif, or a name."""
    place = number % EVERY
    if place == EVERY - 1 and rules.lasting:
        return LONG
    if place in EXTENDED and rules.extended(EXTENDED[place]):
        return str(EXTENDED[place])
    motifs = rules.scripts()
    if not motifs or number % 4 == 0:
        return USUAL
    first = Random(f"{seed} {dtype}").randrange(len(motifs))
    turn = sum(n % 4 > 0 and n % EVERY not in (*EXTENDED, EVERY - 1) for n in range(number))
    return (first + turn) % len(motifs)


def reaching(rules: Rules, least: int) -> int:
    """Number of sequences, at least so many, of which each motif is one."""
    count, kinds = least, {kind_of(rules, 0, "", number) for number in range(least)}
    while not kinds.issuperset(range(len(rules.scripts()))):
        kinds.add(kind_of(rules, 0, "", count))
        count += 1
    return count


class _Drawn:
    """Sequences of one seed and dtype, each drawn after those before it.

    Args:
        rules: whose actions are drawn.
        seed: of the run.
        dtype: of the parameters.
    """

    def __init__(self, rules: Rules, seed: int, dtype: str) -> None:
        self.rules, self.seed, self.dtype = rules, seed, dtype
        self.known = rules.actions()
        self.others = [row for name, row in self.known.items() if name != "build"]
        most = max((row.often for row in self.others), default=0)
        self.frequent = [row for row in self.others if 2 * row.often >= most]
        # How often each choice was taken: what is listed twice is taken twice as often.
        self.taken = {
            name: {key: [0] * len(all_) for key, all_ in row.choices.items() if len(all_) <= LISTED}
            for name, row in self.known.items()
        }
        self.sequences: list[list[Act]] = []
        self.shown: set[Pair] = set()
        self.slots = 0

    def __getitem__(self, number: int) -> Sequence[Act]:
        while len(self.sequences) <= number:
            self.sequences.append(self._next(len(self.sequences)))
        return self.sequences[number]

    def _next(self, number: int) -> list[Act]:
        rules = self.rules
        dice = Random(f"{self.seed} {self.dtype} {number}")
        kind = kind_of(rules, self.seed, self.dtype, number)
        if number % AGAIN == 0:
            self.shown.clear()
        if kind == LONG:
            return self._around(dice, rules.around, rules.lasting)
        if isinstance(kind, int):
            return self._around(dice, rules.around, rules.scripts()[kind])
        if kind == USUAL:
            return self._around(dice, rules.mean)
        return self._around(dice, 1, rules.extended(EXTENDED[number % EVERY]))

    def _around(self, dice: Random, mean: int, motif: Motif = ()) -> list[Act]:
        """`build`, then about `mean` actions, with a motif among the first half of them."""
        count = dice.randint(mean // 2, mean + mean // 2)
        steps = [fixed_step(step) for step in motif]
        begins = bool(steps) and steps[0][0] == "build"
        _, fixed = steps.pop(0) if begins else ("build", {})
        script = [self.known[name].draw(dice, given) for name, given in steps]
        built = self._best(dice, [self.known["build"]] * CANDIDATES, fixed=fixed)
        drawn: list[Act] = []
        for _ in range(count):
            self.slots += 1
            rows = self.frequent if self.slots % OFTEN == 0 else self.others
            candidates = dice.choices(rows, [row.often for row in rows], k=CANDIDATES)
            drawn.append(self._best(dice, candidates, drawn[-NEAR:], (built,)))
        at = dice.randint(0, count // 2)
        return [built, *drawn[:at], *script, *drawn[at:]]

    def _best(
        self,
        dice: Random,
        rows: Sequence[Action],
        before: Sequence[Act] = (),
        built: Sequence[Act] = (),
        fixed: Mapping[str, Value] | None = None,
    ) -> Act:
        """One of several actions, with arguments that were taken least, that shows most."""
        drawn = [self._candidate(dice, row, fixed or {}) for row in rows]
        met = [self._met(act, before, built) for act in drawn]
        best = max(range(len(drawn)), key=lambda at: len(met[at] - self.shown))
        self.shown |= met[best]
        row, act = rows[best], drawn[best]
        for name, taken in self.taken[row.name].items():
            same = [at for at, one in enumerate(row.choices[name]) if one == act.values[name]]
            # NaN equals nothing, but is found.
            same = same or [row.choices[name].index(act.values[name])]
            taken[min(same, key=taken.__getitem__)] += 1
        return act

    def _candidate(self, dice: Random, row: Action, fixed: Mapping[str, Value]) -> Act:
        values: dict[str, Value] = {}
        for name, choices in row.choices.items():
            taken = self.taken[row.name].get(name, [])
            least = [choices[at] for at, times in enumerate(taken) if times == min(taken)]
            values[name] = dice.choice(least or choices)
        return Act(row.name, {**values, **fixed})

    def _met(self, act: Act, before: Sequence[Act], built: Sequence[Act]) -> set[Pair]:
        """Pairs that an action shows after others, the first of which has built the optimizer."""
        own, name = self._things(act), (act.name,)
        found: set[Pair] = {(one, other) for at, one in enumerate(own) for other in own[at + 1 :]}
        for earlier in before:
            found.add(((earlier.name,), name))
            found.update((thing, name) for thing in self._things(earlier))
            found.update(((earlier.name,), thing) for thing in own)
        found.update((thing, name) for first in built for thing in self._things(first))
        return found

    def _things(self, act: Act) -> list[Thing]:
        choices = self.known[act.name].choices
        return [
            (act.name, name, choices[name].index(act.values[name])) for name in self.taken[act.name]
        ]


_drawn = lru_cache(maxsize=16)(_Drawn)
