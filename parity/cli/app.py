"""The command `parity`: run, check, list, doctor, traffic, ledger.

Nothing here imports torch before the words of the command line are known to be right.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from twinstep.parity.cli.command_line import (
    check_engine,
    check_input,
    check_names,
    check_outputs,
    check_repros,
    known_laws,
    known_of_ours,
    seed_from,
)
from twinstep.parity.cli.ending import end
from twinstep.parity.cli.interrupt import before_the_end
from twinstep.parity.records.errors import (
    EXIT_KEPT,
    EXIT_SIGNAL,
    EXIT_TOO_LITTLE,
    EXIT_USAGE,
    UsageError,
)
from twinstep.parity.records.versions import version_of

EXIT_CODES = """\b
Exit codes:
    0  all laws kept
    1  a law is broken
    2  wrong usage, or input that cannot be read
    3  nothing or too little was judged, or it cannot be judged
    4  a device that was asked for is missing
  130  interrupted
"""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=EXIT_CODES,
)

Names = list[str] | None
OpFlag = Annotated[Names, typer.Option("--op", metavar="NAME", help="Operation; may be repeated.")]
KernelFlag = Annotated[
    Names, typer.Option("--kernel", metavar="NAME", help="Kernel; may be repeated.")
]
DtypeFlag = Annotated[
    Names, typer.Option("--dtype", metavar="NAME", help="dtype combination; may be repeated.")
]
LawFlag = Annotated[Names, typer.Option("--law", metavar="NAME", help="Law; may be repeated.")]
EngineFlag = Annotated[
    str | None,
    typer.Option(
        "--engine", metavar="NAME", help="cuda, replay, cpu or interpret; default: chosen."
    ),
]
ExamplesFlag = Annotated[
    int | None,
    typer.Option("--examples", min=1, metavar="N", help="Cases drawn for the law `value`."),
]
SeedFlag = Annotated[
    str | None,
    typer.Option(
        "--seed",
        metavar="N",
        envvar="PARITY_SEED",
        help="Draw other cases: a number, or random; default: the same ones every time.",
    ),
]
QuickFlag = Annotated[bool, typer.Option("--quick", help="A third of the cases.")]
JsonFlag = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="FILE", help="Write all cells as JSON here; - is standard output."
    ),
]
JobsFlag = Annotated[
    int | None,
    typer.Option("--jobs", min=1, metavar="N", help="Processes; default: by the amount of work."),
]
JunitFlag = Annotated[
    str | None, typer.Option("--junitxml", metavar="FILE", help="Write JUnit XML here.")
]
VerboseFlag = Annotated[
    bool, typer.Option("--verbose", "-v", help="Name every law and every reason for a skip.")
]


def _version(asked: bool) -> None:
    if asked:
        found = [f"{name} {version_of(name) or 'missing'}" for name in ("torch", "triton")]
        print(f"parity {version_of('twinstep')} ({', '.join(found)})")
        raise typer.Exit


@app.callback()
def command(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the versions."),
    ] = False,
) -> None:
    """Judge optimizer kernels against their reference, law by law."""


@app.command(epilog=EXIT_CODES)
def run(
    op: OpFlag = None,
    kernel: KernelFlag = None,
    dtype: DtypeFlag = None,
    law: LawFlag = None,
    engine: EngineFlag = None,
    examples: ExamplesFlag = None,
    seed: SeedFlag = None,
    quick: QuickFlag = False,
    verbose: VerboseFlag = False,
    json: JsonFlag = None,
    junitxml: JunitFlag = None,
    jobs: JobsFlag = None,
) -> None:
    """Judge our own kernels."""
    drawn = seed_from(seed)
    operations, ours, dtypes = known_of_ours()
    for flag, asked, known in (("--op", op, operations), ("--kernel", kernel, ours)):
        check_names(flag, asked, known)
    check_names("--dtype", dtype, dtypes)
    _prepare(law, engine, json, junitxml)
    from twinstep.parity.report.progress import during
    from twinstep.parity.runner.fork_server import start_server

    own = "torch" not in sys.modules
    with during("importing torch") as line:
        before_the_end(line.stop)
        from twinstep.parity.cli.judge_command import Outputs, judge_house, selection

    if not (op or kernel or dtype or law or jobs):
        start_server(forked=own)
    chosen = selection(op, kernel, dtype, law, engine)
    outputs = Outputs(json=json, junitxml=junitxml, jobs=jobs, verbose=verbose)
    raise typer.Exit(judge_house(chosen, examples, drawn, quick, outputs))


def _prepare(law: Names, engine: str | None, json: str | None, junitxml: str | None) -> None:
    """Check what both commands take, and choose Triton's interpreter where it is asked for.

    Triton looks when a kernel is decorated, that is, before anything of ours is imported.
    """
    check_names("--law", law, known_laws())
    check_engine(engine)
    check_outputs(json, junitxml)
    check_repros()
    if engine == "interpret":
        os.environ["TRITON_INTERPRET"] = "1"


@app.command(epilog=EXIT_CODES)
def check(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Python file that registers kernels.")
    ],
    op: OpFlag = None,
    kernel: KernelFlag = None,
    dtype: DtypeFlag = None,
    law: LawFlag = None,
    engine: EngineFlag = None,
    examples: ExamplesFlag = None,
    seed: SeedFlag = None,
    quick: QuickFlag = False,
    verbose: VerboseFlag = False,
    json: JsonFlag = None,
    junitxml: JunitFlag = None,
    jobs: JobsFlag = None,
) -> None:
    """Judge what a file registers.

    docs/guide/adding-a-kernel.md describes such a file.
    """
    drawn = seed_from(seed)
    check_input(file)
    _prepare(law, engine, json, junitxml)
    from twinstep.parity.report.progress import during
    from twinstep.parity.runner.fork_server import start_server

    own = "torch" not in sys.modules
    with during("importing torch") as line:
        before_the_end(line.stop)
        from twinstep.parity.cli.judge_command import Outputs, judge_file, selection

    start_server(forked=own)
    chosen = selection(op, kernel, dtype, law, engine)
    outputs = Outputs(json=json, junitxml=junitxml, jobs=jobs, verbose=verbose)
    raise typer.Exit(judge_file(file, chosen, examples, drawn, quick, outputs))


@app.command(name="list")
def list_(
    actions: Annotated[
        bool, typer.Option("--actions", help="Say what each action on an optimizer does.")
    ] = False,
) -> None:
    """List operations, kernels and optimizers."""
    from twinstep.parity.cli.listing import print_list

    print_list(actions)


@app.command()
def doctor() -> None:
    """Show versions, engines and what is missing."""
    from twinstep.parity.cli.doctor import print_doctor

    raise typer.Exit(print_doctor())


@app.command()
def traffic(
    op: OpFlag = None,
    kernel: KernelFlag = None,
    dtype: DtypeFlag = None,
    params: Annotated[
        int,
        typer.Option("--params", min=1, metavar="N", help="Parameters; any number fits in memory."),
    ] = 1 << 20,
    json: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE", help="Write all counts as JSON here; - is standard output."
        ),
    ] = None,
) -> None:
    """Count bytes and instructions of our kernels.

    Exit code 1 if a number is off the design; docs/reference/static-gates.md describes it.
    """
    operations, ours, dtypes = known_of_ours()
    check_names("--op", op, operations)
    check_names("--kernel", kernel, ours)
    check_names("--dtype", dtype, dtypes)
    check_outputs(json, None)
    from twinstep.parity.cli.traffic_command import traffic as count

    raise typer.Exit(count(op, kernel, dtype, params, json))


ledger_app = typer.Typer(no_args_is_help=True, help="Compare what ran, and what must run.")
app.add_typer(ledger_app, name="ledger")


@ledger_app.command(name="diff")
def ledger_diff(
    old: Annotated[str, typer.Argument(metavar="OLD", help="JSON of an earlier run.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="JSON of a later run.")],
) -> None:
    """Show what a change loosened.

    Exit code 1 if it loosened anything: parity ledger diff old.json new.json
    """
    from twinstep.parity.cli.ledger_command import diff

    raise typer.Exit(diff(old, new))


@ledger_app.command(name="declare")
def ledger_declare() -> None:
    """Write anew what must be judged.

    The file is parity/report/declared_cells.json: the cells that our own kernels must fill.
    """
    from twinstep.parity.cli.ledger_command import declare

    raise typer.Exit(declare())


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command and end the process."""
    end(code_of(argv))


def code_of(argv: Sequence[str] | None) -> int:
    """Run the command; its exit code.

    0 is that of a command which has come to its end. Wrong usage is one sentence on standard error.
    """
    try:
        code = app(args=None if argv is None else list(argv), standalone_mode=False)
    except UsageError as error:
        print(f"parity: {error}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print("parity: interrupted", file=sys.stderr)
        return EXIT_SIGNAL + signal.SIGINT
    except BaseException as error:
        return _code_of_error(error)
    return code if isinstance(code, int) else EXIT_KEPT


def _code_of_error(error: BaseException) -> int:
    """Print a usage error of the argument parser as one sentence; anything else with its place.

    No command of ours raises SystemExit: it is of a reference, or another file that was imported.
    """
    message = getattr(error, "format_message", None)
    if isinstance(error.__context__, BrokenPipeError):  # rich has closed its output then
        return EXIT_SIGNAL + signal.SIGPIPE
    if message is None:
        if isinstance(error, Exception):
            traceback.print_exception(error)
        last = traceback.extract_tb(error.__traceback__)[-1]
        says = f"{error!r} [{last.filename}:{last.lineno}]"
        print(f"parity: the command ended before its verdict: {says}", file=sys.stderr)
        return EXIT_TOO_LITTLE
    text = str(message())
    # Without any words the message is the help.
    print(text if text.startswith("Usage:") else f"parity: {text}", file=sys.stderr)
    return EXIT_USAGE
