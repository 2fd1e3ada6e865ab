"""Limits of static facts: rules that always hold, and recorded numbers.

The rules come from what our kernels promise: exact arithmetic. The recorded numbers are those of
one compiler version; with another one only the rules are judged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twinstep.parity.proof.gates.compile.artefacts import CEILINGS, FLOORS, Facts
from twinstep.parity.proof.gates.compile.budgets import over_budget
from twinstep.parity.proof.gates.compile.build import Built
from twinstep.parity.proof.gates.compile.cuda import maker
from twinstep.parity.records.errors import UsageError

FILE = Path(__file__).with_name("ceilings.json")
RULES = {
    "approximate": "exact kernels hold no approximate instruction",
    "contracted": "exact kernels round every product and every sum",
}


@dataclass(frozen=True)
class Ceilings:
    """Recorded facts.

    Attributes:
        compilers: target -> the versions that made its numbers; `cuda.maker` of CUDA C++ kernels.
        facts: (variant, target) -> facts.
    """

    compilers: Mapping[str, str]
    facts: Mapping[tuple[str, str], Facts]


@dataclass(frozen=True)
class Breach:
    """A fact that is not what it should be.

    Attributes:
        variant, target: of what.
        fact: which; empty where there is no fact to name.
        before: what is recorded or allowed.
        after: what was found.
        why: one sentence.
    """

    variant: str
    target: str
    fact: str
    before: int | None
    after: int | None
    why: str


def load(file: Path = FILE) -> Ceilings:
    """Read the file; one that does not exist holds nothing.

    Raises:
        UsageError: it cannot be read.
    """
    if not file.exists():
        return Ceilings({}, {})
    try:
        document = json.loads(file.read_text())
        facts = {
            (name, target): dict(row)
            for name, targets in document["ceilings"].items()
            for target, row in targets.items()
        }
        return Ceilings(dict(document["compilers"]), facts)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UsageError(
            f"{file} is no file of ceilings: {type(error).__name__} {error}"
        ) from error


def save(ceilings: Ceilings, file: Path = FILE) -> None:
    """Write the file: sorted, one line for each kernel and target."""
    by_name: dict[str, list[str]] = {}
    for name, target in sorted(ceilings.facts):
        row = json.dumps(ceilings.facts[name, target], sort_keys=True)
        by_name.setdefault(name, []).append(f"   {json.dumps(target)}: {row}")
    rows = [
        f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }"
        for name, lines in by_name.items()
    ]
    head = json.dumps(dict(sorted(ceilings.compilers.items())), sort_keys=True)
    text = f'{{\n "compilers": {head},\n "ceilings": {{\n' + ",\n".join(rows) + "\n }\n}\n"
    file.write_text(text)


def updated(
    before: Ceilings, found: Sequence[Built], compilers: Mapping[str, str], whole: bool
) -> Ceilings:
    """The ceilings with what was found in place of what was recorded.

    Args:
        before: what is recorded.
        found: without errors.
        compilers: what was compiled with, by target.
        whole: every variant of these targets was compiled: lines of others are dropped.

    Raises:
        UsageError: part of a target was compiled with another compiler than the rest.
    """
    for target, versions in compilers.items():
        if not whole and before.compilers.get(target, versions) != versions:
            raise UsageError(
                f"{target} was recorded with {before.compilers[target]}, here is {versions}: "
                "update all of it, without --op [--update]"
            )
    kept = {
        key: facts
        for key, facts in before.facts.items()
        if not (whole and maker(*key) in compilers)
    }
    new = {(built.variant.name, built.target): built.facts for built in found}
    return Ceilings({**before.compilers, **compilers}, {**kept, **new})


def breaches(
    recorded: Ceilings, found: Sequence[Built], compilers: Mapping[str, str], whole: bool
) -> list[Breach]:
    """Everything that is not as it should be; ceilings only where the compiler is the same."""
    comparable = {t for t, versions in compilers.items() if recorded.compilers.get(t) == versions}
    result: list[Breach] = []
    for built in found:
        result += _of_rules(built)
        if maker(built.variant.name, built.target) in comparable and not built.error:
            result += _of_ceilings(built, recorded.facts.get((built.variant.name, built.target)))
    if whole:
        launched = {(built.variant.name, built.target) for built in found}
        result += [
            Breach(name, target, "", None, None, "has a ceiling, but is launched by no kernel")
            for name, target in sorted(recorded.facts)
            if maker(name, target) in comparable and (name, target) not in launched
        ]
    return result


def _of_rules(built: Built) -> list[Breach]:
    name, target = built.variant.name, built.target
    if built.error:
        return [Breach(name, target, "", None, None, f"does not compile: {built.error}")]
    always = [
        Breach(name, target, fact, 0, built.facts[fact], why)
        for fact, why in RULES.items()
        if built.facts.get(fact, 0)
    ]
    return always + [Breach(name, target, *row) for row in over_budget(name, target, built.facts)]


def _of_ceilings(built: Built, recorded: Facts | None) -> list[Breach]:
    name, target = built.variant.name, built.target
    if recorded is None:
        return [Breach(name, target, "", None, None, "has no ceiling: record one with --update")]
    found = []
    for fact, after in built.facts.items():
        before = recorded.get(fact, 0)
        if fact in CEILINGS and after > before:
            found.append(Breach(name, target, fact, before, after, "rose above its ceiling"))
        if fact in FLOORS and after < before:
            found.append(Breach(name, target, fact, before, after, "fell below its floor"))
    return found


def improvements(recorded: Ceilings, found: Sequence[Built]) -> int:
    """Number of recorded numbers that could be tightened."""
    better = 0
    for built in found:
        before = recorded.facts.get((built.variant.name, built.target), {})
        better += sum(
            fact in before and (after < before[fact] if fact in CEILINGS else after > before[fact])
            for fact, after in built.facts.items()
        )
    return better
