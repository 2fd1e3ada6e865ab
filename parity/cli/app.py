"""The command `parity`: run, check, list, doctor.

Exit codes: 0 all laws kept; 1 a law broken; 2 wrong usage or unreadable input; 3 nothing or too
little ran; 4 a required device is missing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from twinstep.parity.records.errors import EXIT_USAGE, UsageError
from twinstep.parity.runner.fork_server import start_server

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Judge optimizer kernels against their reference, law by law.",
    epilog=(
        "Exit codes: 0 all laws kept; 1 a law broken; 2 wrong usage or unreadable input; "
        "3 nothing or too little ran; 4 a required device is missing."
    ),
)

Names = list[str] | None
OpFlag = Annotated[Names, typer.Option("--op", help="Operation; may be repeated.")]
KernelFlag = Annotated[Names, typer.Option("--kernel", help="Kernel; may be repeated.")]
DtypeFlag = Annotated[Names, typer.Option("--dtype", help="dtype combination; may be repeated.")]
LawFlag = Annotated[Names, typer.Option("--law", help="Law; may be repeated.")]
EngineFlag = Annotated[
    str | None, typer.Option("--engine", help="cuda, replay, cpu or interpret; default: chosen.")
]
ExamplesFlag = Annotated[
    int | None, typer.Option("--examples", min=1, help="Cases drawn for the value law.")
]
SeedFlag = Annotated[
    int | None, typer.Option("--seed", help="Draw other cases; default: the same ones every time.")
]
QuickFlag = Annotated[bool, typer.Option("--quick", help="A third of the cases.")]
JsonFlag = Annotated[
    str | None, typer.Option("--json", help="Write all cells as JSON here; - is standard output.")
]
JobsFlag = Annotated[
    int | None, typer.Option("--jobs", min=1, help="Processes; default: by the amount of work.")
]
JunitFlag = Annotated[str | None, typer.Option("--junitxml", help="Write JUnit XML here.")]


@app.command()
def run(
    op: OpFlag = None,
    kernel: KernelFlag = None,
    dtype: DtypeFlag = None,
    law: LawFlag = None,
    engine: EngineFlag = None,
    examples: ExamplesFlag = None,
    seed: SeedFlag = None,
    quick: QuickFlag = False,
    json: JsonFlag = None,
    junitxml: JunitFlag = None,
    jobs: JobsFlag = None,
) -> None:
    """Judge our own kernels."""
    _prepare(engine)
    if not (op or kernel or dtype or law or jobs):
        start_server()
    from twinstep.parity.cli.judge_command import Outputs, judge_house, selection

    chosen = selection(op, kernel, dtype, law, engine)
    outputs = Outputs(json=json, junitxml=junitxml, jobs=jobs)
    raise typer.Exit(judge_house(chosen, examples, seed, quick, outputs))


def _prepare(engine: str | None) -> None:
    """Choose Triton's interpreter where it is asked for.

    Triton looks when a kernel is decorated, that is, before anything of ours is imported.
    """
    if engine == "interpret":
        os.environ["TRITON_INTERPRET"] = "1"


@app.command()
def check(
    file: Annotated[str, typer.Argument(help="Python file that registers kernels.")],
    op: OpFlag = None,
    kernel: KernelFlag = None,
    dtype: DtypeFlag = None,
    law: LawFlag = None,
    engine: EngineFlag = None,
    examples: ExamplesFlag = None,
    seed: SeedFlag = None,
    quick: QuickFlag = False,
    json: JsonFlag = None,
    junitxml: JunitFlag = None,
    jobs: JobsFlag = None,
) -> None:
    """Judge what a file registers; see docs/guide/adding-a-kernel.md."""
    _prepare(engine)
    start_server()
    from twinstep.parity.cli.judge_command import Outputs, judge_file, selection

    chosen = selection(op, kernel, dtype, law, engine)
    outputs = Outputs(json=json, junitxml=junitxml, jobs=jobs)
    raise typer.Exit(judge_file(file, chosen, examples, seed, quick, outputs))


@app.command(name="list")
def list_() -> None:
    """List operations with their dtypes and laws, and our kernels."""
    from twinstep.parity.cli.judge_command import print_list

    print_list()


@app.command()
def doctor() -> None:
    """Show versions, engines and devices, and what is missing."""
    from twinstep.parity.cli.doctor import print_doctor

    raise typer.Exit(print_doctor())


@app.command()
def traffic(
    op: OpFlag = None,
    kernel: KernelFlag = None,
    dtype: DtypeFlag = None,
    params: Annotated[
        int, typer.Option("--params", min=1, help="Parameters; any number fits in memory.")
    ] = 1 << 20,
    json: Annotated[
        str | None,
        typer.Option("--json", help="Write all counts as JSON here; - is standard output."),
    ] = None,
) -> None:
    """Count bytes, accesses and instructions of our kernels; see docs/reference/static-gates.md."""
    from twinstep.parity.cli.traffic_command import traffic as count

    raise typer.Exit(count(op, kernel, dtype, params, json))


ledger_app = typer.Typer(no_args_is_help=True, help="Compare what ran, and what must run.")
app.add_typer(ledger_app, name="ledger")


@ledger_app.command(name="diff")
def ledger_diff(
    old: Annotated[str, typer.Argument(help="JSON of an earlier run.")],
    new: Annotated[str, typer.Argument(help="JSON of a later run.")],
) -> None:
    """Show what a change loosened; exit code 1 if it did: parity ledger diff old.json new.json."""
    from twinstep.parity.cli.ledger_command import diff

    raise typer.Exit(diff(old, new))


@ledger_app.command(name="declare")
def ledger_declare() -> None:
    """Write parity/report/declared_cells.json: the cells that our own kernels must fill."""
    from twinstep.parity.cli.ledger_command import declare

    raise typer.Exit(declare())


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; wrong usage is one sentence on standard error and exit code 2."""
    try:
        code = app(args=None if argv is None else list(argv), standalone_mode=False)
    except UsageError as error:
        print(f"parity: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except typer.Abort:
        print("parity: interrupted", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    except Exception as error:
        sys.exit(_usage_of_click(error))
    sys.exit(code if isinstance(code, int) else 0)


def _usage_of_click(error: Exception) -> int:
    """Print a usage error of the argument parser as one sentence; anything else is a defect."""
    message = getattr(error, "format_message", None)
    if message is None:
        raise error
    text = str(message())
    print(f"parity: {text}", file=sys.stderr)
    return EXIT_USAGE
