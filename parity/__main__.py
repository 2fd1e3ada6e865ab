"""`python -m twinstep.parity`, and the composition root: the one module that may know everything.

Scenarios, benchmarks and the proof import the judge, so their commands are added here, not in
`parity.cli.app`.
They read their own words; what they do and their exit codes are theirs.
"""

# Annotations are evaluated here: typer is imported only when Ctrl-C is watched for.
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated

from twinstep.parity.cli.ending import supervise
from twinstep.parity.cli.interrupt import watch

__all__ = ["main"]

THEIR_WORDS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and end the process; without words given, those of the command line."""
    if argv is None:
        # Before anything has started a thread, which a fork would lose.
        supervise()
        watch()
    from twinstep.parity.cli.app import main as run_command

    add_commands()
    run_command(argv)


@cache
def add_commands() -> None:
    """Add the commands of other packages to those of the judge, once."""
    import typer

    from twinstep.parity.cli.app import app
    from twinstep.parity.cli.prove_app import prover
    from twinstep.parity.proof.commands.app import proof
    from twinstep.parity.proof.commands.golden import golden

    scenario = typer.Typer(no_args_is_help=True, help="Whole training runs through both sides.")
    app.add_typer(proof)
    app.add_typer(prover)
    app.add_typer(scenario, name="scenario")
    app.add_typer(golden, name="golden")

    @scenario.command("list")
    def scenario_list() -> None:
        """List the named scenarios."""
        from twinstep.scenarios import main as scenarios_main

        raise typer.Exit(scenarios_main(["list"]))

    @scenario.command("run", context_settings=THEIR_WORDS)
    def scenario_run(context: typer.Context) -> None:
        """Run one: parity scenario run overflow_burst --side fast --ranks 4.

        Also lockstep, train, precision, memory, compare and picture: docs/guide/scenarios.md.
        """
        from twinstep.scenarios import main as scenarios_main

        raise typer.Exit(scenarios_main(context.args))

    @golden.command("show")
    def golden_show(
        name: str,
        folder: Annotated[
            Path | None, typer.Option("--folder", metavar="FOLDER", help="Of traces.")
        ] = None,
        picture: Annotated[
            Path | None, typer.Option("--picture", metavar="FILE", help="png, svg or pdf.")
        ] = None,
    ) -> None:
        """Draw a trace: scale, norm, skipped steps."""
        from twinstep.parity.proof.commands.golden import show

        trace = show(name, folder)
        if picture is not None:
            from twinstep.scenarios.golden_picture import draw_golden

            draw_golden(trace, picture)
            print(picture)

    @app.command("bench", context_settings=THEIR_WORDS)
    def bench(context: typer.Context) -> None:
        """Time kernels, and gate what a change costs.

        parity bench run, compare, gate, trend, gpu-check; docs/guide/benchmarks.md describes them.
        """
        from twinstep.benchmarks.bench import main as bench_main

        raise typer.Exit(bench_main(context.args))


if __name__ == "__main__":
    main()
