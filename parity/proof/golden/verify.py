"""All traces put through all ways to replay them, and what disagrees, one sentence each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from twinstep.contract.compat import CORRECT, Compat
from twinstep.golden import manifest
from twinstep.golden.manifest import Entry
from twinstep.golden.trace import TRACES, Step, Trace, read
from twinstep.parity.proof.golden.replay import WAYS, differences, is_rounded, replayed

COMPATS = {"default": CORRECT, "Compat.deepspeed()": Compat.deepspeed()}
Told = Callable[[str], None]


def silent(name: str) -> None:
    """Tell nothing."""
    del name


def faults_of(
    trace: Trace,
    entry: Entry,
    ways: Sequence[str] = WAYS,
    compats: Sequence[str] = tuple(COMPATS),
) -> list[str]:
    """Disagreements of our sides with a trace.

    Args:
        trace: what was recorded.
        entry: of the manifest.
        ways: of `replay.WAYS`; the fast side needs an engine that is active.
        compats: of `COMPATS`.
    """
    said: list[str] = []
    # Our own traces are of our default.
    own = entry.package == "twinstep"
    for compat in [name for name in compats if not own or name == "default"]:
        done: dict[str, list[Step]] = {}
        for way in ways:
            if way == "fast" and entry.untaken:
                continue
            try:
                steps = replayed(trace.header, COMPATS[compat], way)
            except Exception as error:
                said.append(f"{_failure(trace, way, COMPATS[compat], error)} [{way}, {compat}]")
                continue
            done[way] = steps
            for fault in _judged(trace, entry, steps, way, compat):
                said.append(f"{fault} [{way}, {compat}]")
        if "stepped" in done and "fast" in done:
            twin = Trace(header=trace.header, steps=done["stepped"])
            for found in differences(twin, done["fast"]).values():
                fault = found.replace("was recorded", "by the reference")
                said.append(f"{fault} [fast, {compat}]")
    return said


def _failure(trace: Trace, way: str, compat: Compat, error: Exception) -> str:
    """The step whose replay raises, found by replaying ever more of them."""
    header = trace.header
    for count in range(len(header.steps)):
        try:
            replayed(replace(header, steps=header.steps[: count + 1]), compat, way)
        except Exception:
            at = f"step {count} ({header.steps[count]})"
            return f"{header.name}, {at}, error: {type(error).__name__}: {error}"
    return f"{header.name}: {type(error).__name__}: {error}"


def _judged(trace: Trace, entry: Entry, steps: list[Step], way: str, compat: str) -> Iterator[str]:
    found = differences(trace, steps, rounded=is_rounded(trace.header, way))
    knows = trace.header.differs if compat == "default" else ""
    expected = set(entry.differs_in) if knows else set()
    yield from (said for field, said in found.items() if field not in expected)
    if missing := sorted(expected - found.keys()):
        yield (
            f"{trace.header.name}: {', '.join(missing)} should differ ({knows}), but "
            "every step does what was recorded"
        )


def verify(
    folder: Path = TRACES,
    names: Sequence[str] = (),
    ways: Sequence[str] = WAYS,
    told: Told = silent,
) -> tuple[int, list[str]]:
    """Hold the files to their manifest and both sides to the files.

    Args:
        folder: of the traces.
        names: beginnings of names; empty means all.
        ways: of `replay.WAYS`.
        told: called with the name of each trace.

    Returns:
        Number of traces that were replayed, and what disagrees.
    """
    said = manifest.faults(folder)
    entries = manifest.read(folder) if not said else {}
    chosen = [name for name in entries if not names or name.startswith(tuple(names))]
    with engine():
        for name in chosen:
            told(name)
            said += faults_of(read(folder / f"{name}.jsonl"), entries[name], ways)
    return len(chosen), said


@contextmanager
def engine() -> Iterator[None]:
    """Replay, which executes compiled kernels on CPU tensors, unless it is active."""
    from twinstep.replay.triton.driver import activate, active, deactivate

    if active():
        yield
        return
    threads = torch.get_num_threads()
    activate()
    try:
        yield
    finally:
        deactivate()
        torch.set_num_threads(threads)
