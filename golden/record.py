"""Record traces again: `python -m twinstep.golden.record torch`, or `deepspeed`.

Writes into golden/traces, or into the folder named as the second argument. A trace that comes out
otherwise than before is news about that package, not a fix: it is written only with a reason, which
the manifest keeps. One that comes out the same is left as it is, whatever the package's version.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from twinstep.golden import (
    manifest,
    page,
    record_deepspeed,
    record_engine,
    record_runs,
    record_torch,
    record_wrappers,
)
from twinstep.golden.runs import OWN, OWN_RULES, RUNS
from twinstep.golden.sequences import SITUATIONS, Situation
from twinstep.golden.trace import TRACES, Trace, digest, write

ALL = (*SITUATIONS, *RUNS, *OWN)
Recorder = Callable[[Situation], Trace]
BY_RULE: Mapping[str, Mapping[str, Recorder]] = {
    "torch": {"torch": record_torch.record, "adam": record_runs.record_optim},
    "deepspeed": {
        **dict.fromkeys(("static", "dynamic", "wrapper"), record_deepspeed.record),
        **dict.fromkeys(record_wrappers.SUBJECTS, record_wrappers.record),
        **dict.fromkeys(record_runs.SUBJECTS, record_runs.record),
    },
}
ZERO = "zero"


def name_of(situation: Situation) -> str:
    """The name of a situation's trace."""
    package = package_of(situation)
    return "_".join([package, *[situation.rule] * (situation.rule != "torch"), situation.name])


def package_of(situation: Situation) -> str:
    """The package that a situation is recorded from."""
    if situation.rule in OWN_RULES:
        return "twinstep"
    return "torch" if situation.rule in BY_RULE["torch"] else "deepspeed"


def recorded(package: str) -> list[Trace]:
    """Run every situation of a package.

    Raises:
        ImportError: the package is not installed.
        CalledProcessError: a process of several ranks failed.
    """
    recorders = BY_RULE[package]
    traces = [recorders[run.rule](run) for run in ALL if run.rule in recorders]
    if package == "deepspeed":
        traces += record_engine.record([run for run in RUNS if run.rule == ZERO])
    return traces


def keep(
    traces: Sequence[Trace],
    recorder: str,
    situations: Mapping[str, Situation],
    folder: Path,
    reason: str | None,
) -> tuple[list[str], list[str]]:
    """Write traces and their manifest.

    Args:
        traces: recorded now.
        recorder: for the manifest.
        situations: by name of the trace.
        folder: of the files.
        reason: of changes; None refuses them.

    Returns:
        A line for each new or changed trace, and a sentence for each that is refused, where
        nothing at all is written.
    """
    entries = manifest.read(folder)
    lines: list[str] = []
    refused: list[str] = []
    written: list[Trace] = []
    for trace in traces:
        name = trace.header.name
        before = entries.get(name)
        changes = before.changes if before else (manifest.FIRST,)
        if before is None:
            lines.append(f"{name}: new")
            written.append(trace)
        elif before.digest == digest(trace):
            # The version is that of the file, which stays.
            file = folder / f"{name}.jsonl"
            if file.exists() and not manifest.fault_of(file.read_text(), before):
                entries[name] = manifest.described(before, situations[name])
                continue
            lines.append(f"{name}: restored")
            written.append(trace)
        elif reason is None:
            refused.append(f"{name}: it was recorded otherwise; give a --reason to overwrite it")
            continue
        else:
            lines.append(f"{name}: changed, because {reason}")
            written.append(trace)
            changes = (*changes, reason)
        entries[name] = manifest.entry_of(trace, situations[name], recorder, changes)
    if refused:
        return [], refused
    folder.mkdir(parents=True, exist_ok=True)
    for trace in written:
        write(trace, folder)
    manifest.write(entries, folder)
    return lines, []


def main(arguments: Sequence[str]) -> int:
    """Record one package; exit code 2 for wrong usage, a missing package, unexplained changes."""
    parser = argparse.ArgumentParser(prog="python -m twinstep.golden.record")
    parser.add_argument("package", choices=BY_RULE)
    parser.add_argument("folder", nargs="?", type=Path, default=TRACES)
    parser.add_argument("--reason", help="of traces that come out otherwise than before")
    try:
        given = parser.parse_args(arguments)
    except SystemExit as ended:
        return 2 if ended.code else 0
    try:
        traces = recorded(given.package)
    except ImportError as error:
        print(f"{given.package} should be installed to be recorded, but: {error}", file=sys.stderr)
        return 2
    return finish(traces, given.package, given.folder, given.reason)


def finish(traces: Sequence[Trace], recorder: str, folder: Path, reason: str | None) -> int:
    """Keep traces, print what is new or refused, renew the page; the exit code."""
    situations = {name_of(run): run for run in ALL}
    lines, refused = keep(traces, recorder, situations, folder, reason)
    print("\n".join(refused), end="\n" * bool(refused), file=sys.stderr)
    if refused:
        return 2
    if folder == TRACES:
        page.PAGE.write_text(page.rendered(page.PAGE.read_text()))
    print("\n".join([*lines, f"{len(traces)} traces recorded in {folder}"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
