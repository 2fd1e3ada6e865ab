"""The words of `parity prove`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from twinstep.parity.cli.app import DtypeFlag, JobsFlag, KernelFlag, OpFlag, VerboseFlag
from twinstep.parity.cli.command_line import check_input, check_outputs
from twinstep.parity.cli.interrupt import before_the_end
from twinstep.parity.records.errors import UsageError

prover = typer.Typer()


@prover.command(name="prove")
def prove_(
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="Python file that registers kernels; default: ours."),
    ] = None,
    op: OpFlag = None,
    kernel: KernelFlag = None,
    dtype: DtypeFlag = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, metavar="S", help="Limit of one situation.")
    ] = 60.0,
    configurations: Annotated[
        bool,
        typer.Option(
            "--configurations",
            help="Compare the configurations of FILE's kernels with one another instead.",
        ),
    ] = False,
    sizes: Annotated[
        bool,
        typer.Option("--sizes", help="Prove the addresses of flat kernels for every size instead."),
    ] = False,
    verbose: VerboseFlag = False,
    json: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write as JSON here; - is standard output."),
    ] = None,
    jobs: JobsFlag = None,
) -> None:
    """Prove that kernels equal their reference.

    Exit code 1 if one is refuted; docs/guide/proof.md describes it.
    """
    if file is not None:
        check_input(file)
    check_outputs(json, None)
    if configurations and json is not None:
        raise UsageError("--configurations writes no JSON, but --json names a file for it")
    from twinstep.parity.report.progress import during
    from twinstep.parity.runner.fork_server import start_server

    own = "torch" not in sys.modules
    with during("importing torch") as line:
        before_the_end(line.stop)
        from twinstep.parity.cli.judge_command import selection
        from twinstep.parity.prove.command import prove

    if not (configurations or sizes):
        start_server(forked=own)
    chosen = selection(op, kernel, dtype, None, None)
    with during("") as line:
        before_the_end(line.stop)
        if configurations:
            from twinstep.parity.prove.configurations_command import configurations_in

            raise typer.Exit(configurations_in(file, chosen, seconds, line))
        if sizes:
            from twinstep.parity.prove.sizes_command import sizes_in

            raise typer.Exit(sizes_in(file, chosen, seconds, json, line))
        raise typer.Exit(prove(file, chosen, json, seconds, verbose, jobs, line))
