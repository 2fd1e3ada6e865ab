"""The corpus from the command line: make it again, run it, count its instructions."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import CalledProcessError
from time import perf_counter
from typing import Annotated

import typer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=__doc__,
)


Also = Annotated[
    list[str] | None, typer.Option(help="A module that enters further cases; may be repeated.")
]


@app.command()
def make(
    environments: Annotated[Path | None, typer.Option(help="Folder of compilers.")] = None,
    also: Also = None,
) -> None:
    """Compile every kernel with every compiler and write the data folder."""
    from twinstep.replay.corpus.make import ENVIRONMENTS
    from twinstep.replay.corpus.make import make as made

    try:
        corpus = made(environments or ENVIRONMENTS, also or ())
    except (CalledProcessError, RuntimeError) as error:
        print(f"corpus: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    print(f"{len(corpus.entries)} compilations, {len(corpus.distinct())} distinct texts.")


@app.command()
def run(
    case: Annotated[list[str] | None, typer.Option(help="Only these.")] = None,
    also: Also = None,
) -> None:
    """Execute every distinct text on replay and compare with what was stated."""
    from twinstep.replay.corpus.case import CASES
    from twinstep.replay.corpus.execute import execute
    from twinstep.replay.corpus.kernels import load
    from twinstep.replay.corpus.store import read

    load(also or ())
    corpus, wrong, started = read(), 0, perf_counter()
    if left := sorted(set(corpus.sources) - set(CASES)):
        print(f"not run, their statements are in no module given: {', '.join(left)}")
    chosen = [e for e in corpus.distinct() if e.case in (case or CASES) and e.case in CASES]
    for entry in chosen:
        try:
            found = execute(entry, corpus.text(entry).whole).mismatches
        except RuntimeError as error:
            found = [f"{type(error).__name__}: {error}"]
        wrong += bool(found)
        for line in found:
            print(f"{entry.case} {entry.compiler} sm_{entry.sm}: {line}")
    print(f"{len(chosen)} texts, {wrong} wrong, {perf_counter() - started:.1f} s")
    raise typer.Exit(1 if wrong else 0 if chosen else 3)


@app.command()
def census(write: Annotated[bool, typer.Option(help="Write the page.")] = False) -> None:
    """Print which instructions the corpus holds, or write docs/reference/replay-instructions.md."""
    from twinstep.replay.corpus.census import PAGE, page

    if write:
        PAGE.write_text(page())
    else:
        sys.stdout.write(page())


if __name__ == "__main__":
    app()
