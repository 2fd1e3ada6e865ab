"""Replay from the command line: `conformance` of its instructions, and the `corpus` of kernels."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from twinstep.replay.corpus.__main__ import app as corpus

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=__doc__,
)
app.add_typer(corpus, name="corpus")


@app.command()
def conformance(
    cuda: Annotated[bool, typer.Option(help="On the GPU, not on replay.")] = False,
    opcode: Annotated[
        list[str] | None, typer.Option(help="Beginning of an opcode; may be repeated.")
    ] = None,
    thorough: Annotated[
        bool, typer.Option(help="All 65,536 patterns of each 16-bit source.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write every form as JSON here.")] = None,
) -> None:
    """Hold every opcode form to its second, independent statement."""
    import platform

    import torch
    from rich.console import Console

    from twinstep.replay.conformance.report import measure
    from twinstep.replay.errors import ReplayError

    try:
        report = measure("cuda" if cuda else "replay", opcode or (), thorough)
    except ReplayError as error:
        print(f"conformance: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    report.show(Console(width=None if sys.stdout.isatty() else 150))
    if json is not None:
        json.write_text(
            report.as_json({"python": platform.python_version(), "torch": torch.__version__})
        )
    raise typer.Exit(0 if report.conforms else 1)


if __name__ == "__main__":
    app()
