"""Replay executes instructions, not idioms: texts rewritten without a change of meaning run alike.

Registers get other names, independent neighbours trade places, basic blocks are split; outputs,
bytes and counts must stay what they were.
"""

from __future__ import annotations

import random
import re

import hypothesis
import pytest
import torch

from twinstep.replay import ReplayError
from twinstep.replay.corpus.case import CASES
from twinstep.replay.corpus.execute import Outcome, execute, tensors_of
from twinstep.replay.corpus.kernels import load
from twinstep.replay.corpus.store import Entry, read

load(["twinstep.parity.proof.replay_cases"])
THOROUGH = hypothesis.settings().max_examples >= 2000
NAMES = sorted(CASES)[:: 1 if THOROUGH else 3]
REGISTER = re.compile(r"%(?:rd|rs|fd|hh|[rfhpq])\d+\b")
STATEMENT = re.compile(r"(?:@!?%\w+ )?([a-z][\w.:]*)\s+([^;{}]*(?:\{[^{}]*\}[^;{}]*)*);$")
FIXED = ("bra", "brx", "ret", "exit", "call", "bar", "barrier", "membar", "fence", "trap", "cp")
MEMORY = ("ld", "st", "atom", "red", "shfl", "vote", "match", "redux", "elect", "activemask")


def renamed(text: str, rng: random.Random) -> str:
    """Every class of registers gets a new name and a new numbering."""
    for declared, prefix, count in re.findall(r"(\.reg \.\w+\s+(%\w+)<(\d+)>;)", text):
        order = list(range(int(count)))
        rng.shuffle(order)
        text = text.replace(declared, declared.replace(prefix, f"{prefix}_new"))

        def other(match: re.Match[str], name: str = prefix, order: list[int] = order) -> str:
            return f"{name}_new{order[int(match[1])]}"

        text = re.sub(rf"{prefix}(\d+)\b", other, text)
    return text


def body_of(text: str, kernel: str) -> tuple[int, int]:
    """First and last line of a kernel's body."""
    lines = text.splitlines()
    entry = next(i for i, line in enumerate(lines) if re.search(rf"\.entry {kernel}\(", line))
    start = next(i for i in range(entry, len(lines)) if lines[i].strip() == "{")
    depth = 0
    for index in range(start, len(lines)):
        depth += lines[index].count("{") - lines[index].count("}")
        if depth == 0:
            return start + 1, index
    raise AssertionError(f"{kernel} has no end")


def parts(line: str) -> tuple[str, set[str], set[str]] | None:
    """Family, registers written, registers named; None for a line that stays where it is."""
    match = STATEMENT.match(line.strip())
    if match is None or match[1].split(".")[0] in FIXED or "cc" in match[1].split("."):
        return None
    family = match[1].split(".")[0]
    if family in ("addc", "subc", "madc"):
        return None
    first = re.match(r"\{[^}]*\}|[^,]*", match[2])
    assert first is not None
    written = set() if family in ("st", "red") else set(REGISTER.findall(first[0]))
    return family, written, set(REGISTER.findall(line))


def independent(one: str, two: str) -> bool:
    """True if two neighbours may trade places."""
    a, b = parts(one), parts(two)
    if a is None or b is None or (a[0] in MEMORY and b[0] in MEMORY):
        return False
    return not a[1] & b[2] and not b[1] & a[2]


def reordered(lines: list[str], rng: random.Random, careless: bool = False) -> list[str]:
    """Neighbours trade places at random, where they are independent (or always)."""
    lines = list(lines)
    for _ in range(3):
        for at in range(len(lines) - 1):
            pair = lines[at], lines[at + 1]
            movable = all(parts(line) is not None for line in pair)
            if movable and (careless or independent(*pair)) and rng.random() < 0.5:
                lines[at : at + 2] = reversed(pair)
    return lines


def split(lines: list[str], rng: random.Random) -> list[str]:
    """Jumps to the next line at random places, outside inner braces."""
    out: list[str] = []
    depth = 0
    for number, line in enumerate(lines):
        if depth == 0 and parts(line) is not None and rng.random() < 0.15:
            out += [f"bra.uni $SPLIT{number};", f"$SPLIT{number}:"]
        out.append(line)
        depth += line.count("{") - line.count("}")
    return out


def rewritten(text: str, kernel: str, seed: int) -> str:
    """A text with the same meaning."""
    rng = random.Random(seed)
    text = "\n".join(
        line for line in text.splitlines() if not line.strip().startswith((".loc\t", ".loc ", "//"))
    )
    start, end = body_of(text, kernel)
    lines = text.splitlines()
    body = renamed("\n".join(split(reordered(lines[start:end], rng), rng)), rng)
    return "\n".join([*lines[:start], body, *lines[end:]]) + "\n"


def seen(outcome: Outcome) -> dict[str, object]:
    """Everything that must not depend on how the text is written."""
    launch = outcome.launch
    tensors = {
        name: t.contiguous().reshape(-1).view(torch.uint8).tolist()
        for name, t in tensors_of(outcome.run).items()
    }
    return {
        "tensors": tensors,
        "buffers": launch.buffers,
        "widths": launch.widths,
        "charges": launch.approximations,
        "barriers": launch.barriers,
        "shared": (launch.shared_read, launch.shared_written),
    }


def text_of(name: str, seed: int) -> tuple[Entry, str]:
    """One of the texts of a kernel."""
    entries = [entry for entry in read().distinct() if entry.case == name]
    entry = entries[seed % len(entries)]
    return entry, read().text(entry).whole


@pytest.mark.parametrize("name", NAMES)
def test_rewritten_texts_run_alike(name: str) -> None:
    seed = len(name)
    for shift in range(5 if THOROUGH else 1):
        entry, text = text_of(name, seed + shift)
        other = rewritten(text, entry.kernel, seed + shift)
        assert other != text
        outcome = execute(entry, other)
        assert outcome.mismatches == []
        before = execute(entry, text)
        tables = any(isinstance(value, tuple) for value in before.run.arguments.values())
        if tables:  # an address is part of what such a kernel reads
            continue
        assert seen(outcome) == seen(before)


def test_rewriting_renames_moves_and_splits() -> None:
    entry, text = text_of("adamw_of_ours", 0)
    start, end = body_of(text, entry.kernel)
    lines = text.splitlines()[start:end]
    moved = reordered(lines, random.Random(1))
    assert sorted(moved) == sorted(lines)
    assert moved != lines
    assert "bra.uni $SPLIT" in "\n".join(split(lines, random.Random(1)))
    assert "%r_new" in renamed(text, random.Random(1))
    assert not re.search(r"%r\d", renamed(text, random.Random(1)))


def test_what_depends_on_another_is_not_moved() -> None:
    assert independent("add.s32 %r1, %r2, %r3;", "mul.f32 %f1, %f2, %f3;")
    assert not independent("add.s32 %r1, %r2, %r3;", "add.s32 %r4, %r1, %r3;")
    assert not independent("add.s32 %r1, %r2, %r3;", "mov.u32 %r2, 5;")
    assert not independent("st.global.b32 [%rd1], %r1;", "ld.global.b32 %r2, [%rd2];")
    assert not independent("add.cc.u32 %r1, %r2, %r3;", "mov.u32 %r9, 5;")
    assert not independent("@%p1 mov.u32 %r1, %r2;", "setp.eq.s32 %p1, %r8, 0;")
    assert not independent("shfl.sync.bfly.b32 %r1|%p1, %r2, 1, 31, -1;", "mov.u32 %r1, 3;")


def test_a_careless_order_is_noticed() -> None:
    """Were results not to depend on the order at all, the test above would show nothing."""
    entry, text = text_of("adamw_of_ours", 0)
    lines = text.splitlines()
    start, end = body_of(text, entry.kernel)
    body = reordered(lines[start:end], random.Random(3), careless=True)
    careless = "\n".join([*lines[:start], *body, *lines[end:]])
    try:
        found = execute(entry, careless).mismatches
    except ReplayError as error:
        found = [str(error)]
    assert found
