"""`python -m twinstep.parity`, and the composition root: the one module that may know everything.

Scenarios, benchmarks and the proof import the judge, so their commands are added here, not in
`parity.cli.app`.
They read their own words; what they do and their exit codes are theirs.
"""

from __future__ import annotations

import typer

from twinstep.parity.cli.app import app, main
from twinstep.parity.proof.commands.app import proof

__all__ = ["app", "main"]

THEIR_WORDS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
scenario = typer.Typer(no_args_is_help=True, help="Whole training runs through both sides.")
golden = typer.Typer(no_args_is_help=True, help="Traces of third parties, kept for good.")
app.add_typer(proof)
app.add_typer(scenario, name="scenario")
app.add_typer(golden, name="golden")


@scenario.command("list")
def scenario_list() -> None:
    """List the scenario commands."""
    from twinstep.scenarios import main as scenarios_main

    raise typer.Exit(scenarios_main(["--help"]))


@scenario.command("run", context_settings=THEIR_WORDS)
def scenario_run(context: typer.Context) -> None:
    """Run one of them: parity scenario run lockstep --dtype fp16; see docs/guide/scenarios.md."""
    from twinstep.scenarios import main as scenarios_main

    raise typer.Exit(scenarios_main(context.args))


@golden.command("record", context_settings=THEIR_WORDS)
def golden_record(context: typer.Context) -> None:
    """Record the traces of a package again: parity golden record torch."""
    from twinstep.golden.record import main as record_main

    raise typer.Exit(record_main(context.args))


@app.command("bench", context_settings=THEIR_WORDS)
def bench(context: typer.Context) -> None:
    """Run what only a GPU can show, as make gpu-check does."""
    from twinstep.benchmarks.gpu_check import main as bench_main

    raise typer.Exit(bench_main(context.args))


if __name__ == "__main__":
    main()
