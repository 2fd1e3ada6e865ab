"""The manifest of traces: digest, origin and place in a replay of each, and why it was changed.

A digest leaves out the version of the package that was recorded: a new version that does the same
has the same digest. The manifest lies beside the traces and has a hash of every line of theirs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from twinstep.golden.sequences import Situation
from twinstep.golden.trace import TRACES, Trace, digest, from_text, line_digests, to_text

SCHEMA = 1
NAME = "manifest.json"
FIRST = "first recorded"
LISTED = ("differs_in", "changes")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Facts of one trace.

    Attributes:
        digest: of the trace without its version.
        lines: hashes of its lines, the header's without its version, with spaces between.
        package: whose behaviour it is.
        version: of that package when the trace was last written.
        recorder: argument of `parity golden record` that records it.
        differs_in: fields in which our default differs; the header's `differs` has the reason.
        untaken: why no path of the fast side replays it; empty where one does.
        changes: the reason of each recording that changed it, oldest first.
    """

    digest: str
    lines: str
    package: str
    version: str
    recorder: str
    differs_in: tuple[str, ...] = ()
    untaken: str = ""
    changes: tuple[str, ...] = (FIRST,)


Entries = Mapping[str, Entry]


def entry_of(
    trace: Trace, situation: Situation, recorder: str, changes: tuple[str, ...] = (FIRST,)
) -> Entry:
    """The entry of a trace that was recorded now."""
    return Entry(
        digest=digest(trace),
        lines=" ".join(line_digests(to_text(trace))),
        package=trace.header.package,
        version=trace.header.version,
        recorder=recorder,
        differs_in=situation.differs_in,
        untaken=situation.untaken,
        changes=changes,
    )


def described(entry: Entry, situation: Situation) -> Entry:
    """An entry with what its situation knows now."""
    return replace(
        entry,
        differs_in=situation.differs_in,
        untaken=situation.untaken,
    )


def read(folder: Path = TRACES) -> dict[str, Entry]:
    """The manifest of a folder; empty where there is none.

    Raises:
        ValueError: the file is no manifest.
    """
    path = folder / NAME
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text())
        if data["schema"] != SCHEMA:
            raise ValueError(f"its schema is {data['schema']}, but should be {SCHEMA}")
        return {
            name: Entry(**(row | {listed: tuple(row[listed]) for listed in LISTED}))
            for name, row in data["traces"].items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{NAME} should be a manifest of traces, but: {error!r}") from error


def write(entries: Entries, folder: Path = TRACES) -> Path:
    """Write the manifest of a folder and return its path."""
    rows = {name: asdict(entry) for name, entry in sorted(entries.items())}
    path = folder / NAME
    path.write_text(json.dumps({"schema": SCHEMA, "traces": rows}, indent=1) + "\n")
    return path


def faults(folder: Path = TRACES) -> list[str]:
    """Disagreements of traces with their manifest, one sentence each."""
    try:
        entries = read(folder)
    except ValueError as error:
        return [str(error)]
    if not entries:
        return [f"{folder} should hold {NAME}, but does not"]
    found = {path.stem: path for path in folder.glob("*.jsonl")}
    said = [
        f"{name}: the file is gone, but the manifest has it; record it again"
        for name in sorted(entries.keys() - found.keys())
    ]
    said += [
        f"{name}: the file is there, but the manifest does not have it; record it with a reason"
        for name in sorted(found.keys() - entries.keys())
    ]
    for name in sorted(entries.keys() & found.keys()):
        fault = fault_of(found[name].read_text(), entries[name])
        said += [f"{name}: {fault}"] if fault else []
    return said


def fault_of(text: str, entry: Entry) -> str:
    """The first disagreement of a trace's text with its entry; empty where there is none."""
    wanted = entry.lines.split()
    try:
        lines = line_digests(text)
    except ValueError as error:
        return str(error)
    if len(lines) != len(wanted):
        return f"the file has {len(lines)} lines, but {len(wanted)} were recorded"
    moved = [at for at, pair in enumerate(zip(lines, wanted, strict=True)) if len(set(pair)) > 1]
    if moved and sorted(lines) == sorted(wanted):
        numbers = " and ".join(str(at + 1) for at in moved)
        return f"lines {numbers} were recorded in another order"
    if moved:
        what = f"the line of step {moved[0] - 1}" if moved[0] else "the header"
        return f"{what} is not what was recorded (line {moved[0] + 1})"
    try:
        trace = from_text(text, "the file")
    except (KeyError, TypeError, ValueError) as error:
        return str(error)
    if trace.header.version != entry.version:
        return (
            f"the header has version {trace.header.version} of {entry.package}, but "
            f"{entry.version} was recorded"
        )
    if digest(trace) != entry.digest:
        return "the digest in the manifest is not that of its own lines"
    return ""
