"""`parity golden`: traces recorded, verified, compared, shown."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from twinstep.golden.trace import TRACES, Trace, read

golden = typer.Typer(no_args_is_help=True, help="Traces of third parties, kept for good.")
THEIR_WORDS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
Folder = Annotated[
    Path | None, typer.Option("--folder", metavar="FOLDER", help="Of traces; default: ours.")
]


@golden.command("record", context_settings=THEIR_WORDS)
def golden_record(context: typer.Context) -> None:
    """Record them again: parity golden record torch."""
    if context.args[:1] == ["twinstep"]:
        from twinstep.parity.proof.golden.record_own import main as own_main

        raise typer.Exit(own_main(context.args[1:]))
    from twinstep.golden.record import main as record_main

    raise typer.Exit(record_main(context.args))


@golden.command("verify")
def golden_verify(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Beginnings of names.")
    ] = None,
    side: Annotated[
        str, typer.Option("--side", metavar="SIDE", help="reference, fast or both.")
    ] = "both",
    folder: Folder = None,
) -> None:
    """Hold the files to their manifest, and both sides to the files.

    Names the first step and the field that differ.
    """
    raise typer.Exit(verified(names or (), side, folder))


@golden.command("planted")
def golden_planted() -> None:
    """Change single lines of our source, in a copy.

    verify must name a trace, a step and a field each time.
    """
    raise typer.Exit(planted_faults())


@golden.command("list")
def golden_list(folder: Folder = None) -> None:
    """List the traces with what they were recorded from."""
    from twinstep.golden import manifest

    entries = manifest.read(folder or TRACES)
    for name, entry in entries.items():
        print(f"{name}  ({entry.package} {entry.version})")
    print(f"{len(entries)} traces")


@golden.command("diff")
def golden_diff(one: str, other: str, folder: Folder = None) -> None:
    """Name what differs between two traces: names or files."""
    from twinstep.golden.show import diff

    said = diff(_trace(one, folder), _trace(other, folder))
    print("\n".join(said) or "nothing differs")
    raise typer.Exit(1 if said else 0)


def show(name: str, folder: Path | None) -> Trace:
    """Print a trace and return it."""
    from twinstep.golden.show import lines

    trace = _trace(name, folder)
    print("\n".join(lines(trace)))
    return trace


def verified(names: Sequence[str], side: str, folder: Path | None = None) -> int:
    """Verify and print; the exit code."""
    from twinstep.parity.proof.golden.verify import silent, verify
    from twinstep.parity.records.errors import (
        EXIT_BROKEN,
        EXIT_KEPT,
        EXIT_TOO_LITTLE,
        UsageError,
    )

    sides = {"reference": ("reference",), "fast": ("stepped", "fast")}
    sides["both"] = (*sides["reference"], *sides["fast"])
    if side not in sides:
        raise UsageError(f"--side {side} should be one of {', '.join(sides)}")
    _check_names(names, folder or TRACES)
    count, said = verify(folder or TRACES, names, sides[side], _progress() or silent)
    print("\n".join(said), end="\n" * bool(said))
    print(f"{count} traces replayed, {len(said)} disagreements")
    if said:
        return EXIT_BROKEN
    return EXIT_KEPT if count else EXIT_TOO_LITTLE


def _check_names(names: Sequence[str], folder: Path) -> None:
    """Refuse a name that no trace begins with; a manifest at fault is for `verify` to report."""
    from twinstep.golden import manifest
    from twinstep.parity.records.names import unknown

    try:
        known = manifest.read(folder)
    except ValueError:
        return
    for name in names if known else ():
        if not any(one.startswith(name) for one in known):
            raise unknown("trace", name, known, "parity golden list")


def planted_faults() -> int:
    """Plant every fault and print what verify says of it; the exit code."""
    import tempfile

    from twinstep.parity.proof.golden.planted import PLANTED, verified_with
    from twinstep.parity.records.errors import EXIT_BROKEN, EXIT_KEPT

    unnoticed = 0
    for planted in PLANTED:
        with tempfile.TemporaryDirectory() as folder:
            outcome = verified_with(planted, Path(folder))
        named = outcome.code == EXIT_BROKEN and outcome.first
        unnoticed += not named
        print(f"{planted.side}, {planted.name}: {outcome.first if named else 'NOT NAMED'}")
        if not named:
            print(outcome.said)
    print(f"{len(PLANTED)} faults planted, {unnoticed} not named")
    return EXIT_BROKEN if unnoticed else EXIT_KEPT


def _progress() -> Callable[[str], None] | None:
    if not sys.stderr.isatty():
        return None

    def told(name: str) -> None:
        print(f"\r\033[K{name}", end="", file=sys.stderr, flush=True)

    return told


def _trace(name: str, folder: Path | None) -> Trace:
    from twinstep.parity.records.errors import UsageError

    path = Path(name) if name.endswith(".jsonl") else (folder or TRACES) / f"{name}.jsonl"
    if not path.exists():
        raise UsageError(f"{name} should be a trace or a file; parity golden list has the names")
    try:
        return read(path)
    except ValueError as error:
        raise UsageError(str(error)) from error
